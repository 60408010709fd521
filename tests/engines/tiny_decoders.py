"""Tiny decoders with random weights large enough that each token matters, and a plain forward pass to compare with."""

import copy
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from rollart.core.types import Completion, GenerationRequest, Sampling

VOCABULARY = 48
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": None,
}
ARCHITECTURES = ("qwen3", "llama", "qwen3_moe", "mistral", "qwen2")


def decoder(architecture: str = "qwen3", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    match architecture:
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**_SHAPE, tie_word_embeddings=True)).eval()
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**_SHAPE)).eval()
        case "mistral":
            return MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=24)).eval()
        case "qwen2":
            network = Qwen2ForCausalLM(Qwen2Config(**_SHAPE)).eval()
            for name, weight in network.named_parameters():
                if name.endswith("bias"):  # made as zeros, which would show nothing
                    torch.nn.init.normal_(weight, std=0.3)
            return network
        case _:
            shape = {**_SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).eval()


def twin(network: Any) -> Any:
    """A copy with a configuration of its own, so that the engine's attention stays the engine's."""
    return copy.deepcopy(network)


def request(name: str, tokens: list[int], session: str | None = None, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(name, session or name, "test", 0, tokens, Sampling(**sampling))


@torch.inference_mode()
def plain_logprobs(network: Any, context: list[int], tokens: list[int], sampling: Sampling) -> torch.Tensor:
    """Of `tokens` after `context`, by one forward pass over everything and transformers' own top-k and top-p."""
    ids = torch.tensor([context + tokens])
    logits = network(ids).logits[0, len(context) - 1 : -1].float() / sampling.temperature
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(ids, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(ids, logits)
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)


def worst(versions: dict[int, Any], asked: GenerationRequest, completion: Completion) -> float:
    """The largest distance of a logprob from the plain one under the weights of that token's version."""
    gap = 0.0
    got = torch.tensor(completion.logprobs)
    made = torch.tensor(completion.versions)
    assert len(got) == len(made) == len(completion.tokens)
    for version in set(completion.versions):
        expected = plain_logprobs(versions[version], asked.tokens, completion.tokens, asked.sampling)
        gap = max(gap, float((expected - got)[made == version].abs().max()))
    return gap
