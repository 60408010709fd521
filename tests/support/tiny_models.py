"""Tiny real models and samples for the tests of the trainer."""

import random
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollart.core.column import Column
from rollart.core.types import Batch, Sample, SampleGroup

VOCABULARY = 24
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def tiny_model(architecture: str = "qwen3", *, seed: int = 0, **options: object) -> PreTrainedModel:
    make, config = {
        "qwen3": (Qwen3ForCausalLM, Qwen3Config),
        "llama": (LlamaForCausalLM, LlamaConfig),
        "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig),
    }[architecture]
    extra = EXPERTS if architecture == "qwen3_moe" else {}
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(seed)
    return make(config(**(sizes | extra | options))).eval()


def save_tiny(folder: Path, architecture: str = "qwen3", **options: object) -> Path:
    tiny_model(architecture, **options).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "hello"}')
    return folder


def make_sample(reward: float, draw: random.Random, *, task: str = "t", version: int = 0, length: int = 12) -> Sample:
    """Two turns of observation and action, with logprobs of about the right size."""
    mask = [0, 0, 0, 1, 1, 0, 0] + [1] * (length - 7)
    return Sample(
        id=f"{task}-{draw.random()}",
        task=task,
        tokens=Column.ints([draw.randrange(VOCABULARY) for _ in mask]),
        roles=Column.flags(mask),
        logprobs=Column.floats([-3.0] * sum(mask)),
        versions=Column.ints([version] * sum(mask)),
        reward=reward,
    )


def make_batch(step: int, rewards: list[list[float]], *, seed: int = 0, task: str = "t") -> Batch:
    draw = random.Random(seed)
    groups = [
        SampleGroup(
            str(number), task, tuple(make_sample(r, draw, task=task, length=draw.randint(8, 30)) for r in group)
        )
        for number, group in enumerate(rewards)
    ]
    return Batch(step, tuple(groups))
