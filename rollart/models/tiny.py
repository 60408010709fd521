"""A tiny causal LM made from scratch: random weights, a character tokenizer and a chat template, as an ordinary folder.

A turn costs two tokens in addition to its text: one opens it and names the role, one ends an action. Observations need
no end: the next role's token ends them.
"""

import math
from pathlib import Path
from typing import Any

from rollart.config import TinyModelConfig
from rollart.models.folder import atomic_folder

PAD, UNKNOWN, END = "<|pad|>", "<|unk|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = (PAD, UNKNOWN, END, *(f"<|{role}|>" for role in ROLES))
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make(config: TinyModelConfig, path: Path, seed: int) -> Path:
    """The same config and seed give the same folder, byte for byte."""
    import torch

    with torch.random.fork_rng(devices=[]), atomic_folder(path) as draft:
        torch.manual_seed(seed)
        model = architecture(config)
        _initialise(model)
        model.save_pretrained(draft)
        tokenizer(config.context).save_pretrained(draft)
    return path


def tokenizer(context: int) -> Any:
    """Printable ASCII and the newline, one token each; any other character is the unknown token."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=list(SPECIAL[3:]),
        chat_template=TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def sizes(config: TinyModelConfig) -> dict[str, Any]:
    """The values of its `config.json`."""
    common = {
        "vocab_size": len(SPECIAL) + len(CHARACTERS),
        "hidden_size": config.hidden,
        "intermediate_size": 3 * config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.hidden // config.heads,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": True,
        "pad_token_id": SPECIAL.index(PAD),
        "eos_token_id": SPECIAL.index(END),
        "bos_token_id": None,
        "dtype": "float32",
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 3 * config.hidden // 2}
    return common | experts if config.architecture == "qwen3_moe" else common


def architecture(config: TinyModelConfig) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.architecture, **sizes(config)))


def _initialise(model: Any) -> None:
    """Each layer keeps the scale of its input; the residual stream does not grow with depth; norms stay at one."""
    from torch import nn

    into_residual = 1 / math.sqrt(2 * model.config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            scale = into_residual if "o_proj" in name or "down_proj" in name else 1.0
            nn.init.normal_(parameter, std=scale / math.sqrt(parameter.shape[-1]))
