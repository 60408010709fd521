"""The time of a decoder's forward pass on a device: the slower of computing and reading memory.

Plain arithmetic, so that the router, placement, emulated engines and the simulator all predict with the same formula.
Two efficiencies are the only constants; they are set once, not per experiment.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.core.errors import RollartError
from rollart.hardware.devices import DeviceClass

COMPUTE_EFFICIENCY = 0.55
MEMORY_EFFICIENCY = 0.75


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a decoder that decide its cost. Parameters of experts are counted separately: a pass reads only
    the experts of its tokens. So are those of an untied input embedding (`lookup`), which take memory but no time: a
    pass reads only the rows of its tokens."""

    dense: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    expert: int = 0
    experts: int = 0
    experts_per_token: int = 0
    number_bytes: int = 2
    lookup: int = 0
    hidden: int = 0

    @property
    def parameters(self) -> int:
        return self.dense + self.expert * self.experts + self.lookup

    @property
    def token_flops(self) -> float:
        """Matrix work for one token, without attention to its context."""
        return 2.0 * (self.dense + self.expert * self.experts_per_token)

    @property
    def attention_flops(self) -> float:
        """Of one token attending to one other."""
        return 4.0 * self.layers * self.heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.number_bytes

    def weight_bytes(self, tokens: int) -> float:
        """Bytes of weights that a pass over `tokens` tokens reads."""
        if not self.experts:
            return float(self.dense * self.number_bytes)
        touched = 1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens
        return (self.dense + self.expert * self.experts * touched) * self.number_bytes

    @classmethod
    def of(cls, config: Mapping[str, Any], number_bytes: int = 2) -> "ModelShape":
        """From the `config.json` of a Hugging Face model with gated feed-forward layers (Llama, Qwen, ...)."""
        try:
            hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
            vocabulary = config["vocab_size"]
            inner = config.get("moe_intermediate_size") or config["intermediate_size"]
        except KeyError as missing:
            raise RollartError(f"the model's config.json has no {missing}, which its roofline needs") from None
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        feed_forward = 3 * hidden * inner
        dense = layers * (attention + (0 if experts else feed_forward)) + vocabulary * hidden
        return cls(
            dense=dense + (layers * hidden * experts if experts else 0),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            expert=layers * feed_forward if experts else 0,
            experts=experts,
            experts_per_token=config.get("num_experts_per_tok") or 0,
            number_bytes=number_bytes,
            lookup=0 if config.get("tie_word_embeddings") else vocabulary * hidden,
            hidden=hidden,
        )

    @classmethod
    def of_folder(cls, folder: Path, number_bytes: int = 2) -> "ModelShape":
        return cls.of(json.loads((folder / "config.json").read_text()), number_bytes)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one forward pass: `tokens` computed, `attended` pairs of a computed token and one it attends to,
    `kv_tokens` whose KV is read."""

    tokens: int
    attended: int
    kv_tokens: int

    def __add__(self, other: "Work") -> "Work":
        return Work(self.tokens + other.tokens, self.attended + other.attended, self.kv_tokens + other.kv_tokens)


def prefill(new: int, context: int) -> Work:
    """`new` tokens after `context` tokens that are cached."""
    return Work(new, new * context + new * (new + 1) // 2, context + new)


def decode(sequences: int, contexts: int) -> Work:
    """One token for each of `sequences`, whose contexts have `contexts` tokens in all."""
    return Work(sequences, contexts, contexts)


@dataclass(frozen=True, slots=True)
class Roofline:
    """`slowdown` divides the device's speed, for emulation; `devices` share the work of one model evenly."""

    device: DeviceClass
    shape: ModelShape
    slowdown: float = 1.0
    devices: int = 1

    def compute_seconds(self, work: Work) -> float:
        flops = work.tokens * self.shape.token_flops + work.attended * self.shape.attention_flops
        return self.slowdown * flops / (self.device.tflops * 1e12 * COMPUTE_EFFICIENCY * self.devices)

    def memory_seconds(self, work: Work) -> float:
        read = self.shape.weight_bytes(work.tokens) + work.kv_tokens * self.shape.kv_bytes
        return self.slowdown * read / (self.device.bandwidth * 1e9 * MEMORY_EFFICIENCY * self.devices)

    def seconds(self, work: Work) -> float:
        """One forward pass."""
        return max(self.compute_seconds(work), self.memory_seconds(work)) if work.tokens else 0.0

    def transfer_seconds(self, tokens: int) -> float:
        """To send the KV of `tokens` tokens to an engine on another node; its devices share the node's network."""
        rate = min(self.device.link, self.device.network) * 1e9 * MEMORY_EFFICIENCY
        return self.slowdown * tokens * self.shape.kv_bytes / rate
