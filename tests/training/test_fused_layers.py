"""Decoder layers with gradients by hand against those of transformers."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCABULARY, save_tiny
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rollart.config import TrainingConfig
from rollart.training import policy as policies
from rollart.training.fused import FusedLayer
from rollart.training.kernels import LayerKernels
from rollart.training.packing import Packed, pack
from rollart.training.policy import PolicyModel, multiplies_bfloat16

BFLOAT16 = TrainingConfig(dtype="bfloat16")

if LayerKernels.of(16, torch.float32) is None:
    pytest.skip("no C compiler", allow_module_level=True)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def qwen2(folder: Path) -> Path:
    """Its queries, keys and values have a bias."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return folder


def saved(folder: Path, kind: str) -> Path:
    return qwen2(folder) if kind == "qwen2" else save_tiny(folder, kind, head_dim=32)


def rows_of(*lengths: int, prompt: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Sequences, of which every other one begins with the same prompt, and what is trained of them."""
    draw = random.Random(2)
    shared = [draw.randrange(VOCABULARY) for _ in range(prompt)]
    rows = [
        (shared if number % 2 else []) + [draw.randrange(VOCABULARY) for _ in range(length)]
        for number, length in enumerate(lengths)
    ]
    masks = [[0] * (prompt if number % 2 else 1) + [1] * len(row) for number, row in enumerate(rows)]
    return rows, [[0, *mask[1 : len(row)]] for mask, row in zip(masks, rows, strict=True)]


def fused(policy: PolicyModel) -> bool:
    return all(isinstance(layer.forward, FusedLayer) for layer in policies._layers(policy.model))


def plain(folder: Path, config: TrainingConfig, monkeypatch: pytest.MonkeyPatch) -> PolicyModel:
    with monkeypatch.context() as patch:
        patch.setattr(policies, "fuse_layers", lambda model, layers: None)
        return PolicyModel(folder, config=config)


def computed(policy: PolicyModel, packed: Packed) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs, entropy = policy.logprobs(packed)
    weights = torch.linspace(-1, 1, len(logprobs))
    ((logprobs * weights).sum() + 0.1 * entropy.sum()).backward()
    return logprobs.detach(), {name: value.grad for name, value in policy.parameters().items()}


def worst_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Of the gradient of any weight, relative to its norm, or to a hundredth of all: some nearly cancel out."""
    least = 0.01 * max(float(value.norm()) for value in right.values())
    return max(float((left[name] - right[name]).norm() / right[name].norm().clamp_min(least)) for name in right)


@pytest.mark.parametrize("threads_used", [1, 2])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
@pytest.mark.parametrize(("lengths", "prompt"), [((9, 3, 21), 0), ((20, 12, 1, 7, 5, 9, 40), 5), ((150, 90), 70)])
def test_gradients_are_those_of_the_model_itself(
    threads_used: int,
    kind: str,
    lengths: tuple[int, ...],
    prompt: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(threads_used)
    folder = saved(tmp_path, kind)
    ours, theirs = PolicyModel(folder), plain(folder, TrainingConfig(), monkeypatch)
    assert fused(ours)
    assert not fused(theirs)
    packed = pack(*rows_of(*lengths, prompt=prompt), share=True)
    logprobs, gradients = computed(ours, packed)
    expected, slopes = computed(theirs, packed)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    assert worst_difference(gradients, slopes) < 2e-5


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 80), min_size=1, max_size=6), prompt=st.integers(1, 40))
def test_a_shared_prompt_changes_nothing(
    lengths: list[int], prompt: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    policy = PolicyModel(saved(tmp_path_factory.mktemp("model"), "qwen3"))
    rows = rows_of(*(length + 1 for length in lengths), prompt=prompt)
    together, apart = (pack(*rows, share=share) for share in (True, False))
    logprobs, gradients = computed(policy, together)
    gradients = {name: value.clone() for name, value in gradients.items()}
    policy.model.zero_grad()
    expected, slopes = computed(policy, apart)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    assert worst_difference(gradients, slopes) < 2e-5


@pytest.mark.skipif(not multiplies_bfloat16(), reason="no instructions for bfloat16")
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, "qwen3")
    packed = pack(*rows_of(30, 20, 8, 25, prompt=6), share=True)
    _, exact = computed(PolicyModel(folder), packed)
    ours, theirs = PolicyModel(folder, config=BFLOAT16), plain(folder, BFLOAT16, monkeypatch)
    assert fused(ours)
    (_, rounded), (_, usual) = computed(ours, packed), computed(theirs, packed)
    assert worst_difference(rounded, exact) <= 1.2 * worst_difference(usual, exact)


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64))


@pytest.mark.parametrize("kind", ["gpt2", "another head size", "experts"])
def test_a_model_of_another_build_keeps_its_own_pass(kind: str, tmp_path: Path) -> None:
    if kind == "gpt2":
        gpt2().save_pretrained(tmp_path)
    else:
        save_tiny(tmp_path, "qwen3_moe" if kind == "experts" else "qwen3", head_dim=32 if kind == "experts" else 8)
    assert not fused(PolicyModel(tmp_path))


def test_a_layer_that_computes_something_else_keeps_its_own_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    folder, forward = saved(tmp_path, "qwen3"), Qwen3MLP.forward
    monkeypatch.setattr(Qwen3MLP, "forward", lambda self, x: 2 * forward(self, x))
    assert not fused(PolicyModel(folder))
