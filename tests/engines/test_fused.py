import random
from collections.abc import Iterator

import pytest
import torch
from steppers import engine, run, text
from tiny_decoders import ARCHITECTURES, decoder, request, twin, worst
from transformers import GPT2Config, GPT2LMHeadModel

from rollart.config import EngineConfig
from rollart.engines.torch import kernels, products
from rollart.engines.torch.fused import FusedDecoder
from rollart.engines.torch.kernels import CompiledKernels, TorchKernels
from rollart.engines.torch.model import EngineModel
from rollart.engines.torch.panels import PanelKernels, PanelProduct
from rollart.engines.torch.products import PackedProduct, PlainProduct
from rollart.engines.torch.stepper import Stepper

WAYS = {
    "compiled": (CompiledKernels, PanelProduct),
    "packed": (CompiledKernels, PackedProduct),
    "plain": (CompiledKernels, PlainProduct),
    "operators": (TorchKernels, PlainProduct),
    "network": (None, None),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The forward passes of the engine: by our C code with its own, oneDNN's or plain products, by torch operators, and
    the network's own."""
    if request.param in ("packed", "plain"):
        monkeypatch.setattr(PanelKernels, "of", lambda *_: None)
    if request.param == "packed":
        monkeypatch.setattr(products, "PACK_FROM", 1)
    if request.param == "operators":
        monkeypatch.setattr(kernels, "native_library", lambda *_: None)
    if request.param == "network":
        monkeypatch.setattr(FusedDecoder, "of", lambda *_: None)
    yield request.param


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_passes_give_the_logprobs_of_transformers(architecture: str, way: str) -> None:
    network, rng = decoder(architecture), random.Random(0)
    asked = [request(str(n), text(rng, size), max_tokens=30) for n, size in enumerate((3, 40, 90, 300, 7))]
    stepper = engine(network, prefill_chunk=128)
    fused = stepper._model.fused
    kind, product = WAYS[way]
    if kind is None or product is None:
        assert fused is None
    else:
        assert fused is not None and isinstance(fused._kernels, kind) and isinstance(fused._weights.head, product)
    made = run(stepper, *asked)
    assert max(worst({0: network}, one, made[one.id]) for one in asked) <= 1e-4


def test_bfloat16_is_as_near_to_float32_as_the_networks_own_pass(way: str) -> None:
    network, rng = decoder("llama"), random.Random(0)
    asked = [request(str(n), text(rng, 60), max_tokens=30) for n in range(4)]
    half = twin(network).to(torch.bfloat16)
    made = run(Stepper(EngineModel(half), EngineConfig()), *asked)
    rounded = twin(network).to(torch.bfloat16).float()
    gaps = [worst({0: rounded}, one, made[one.id]) for one in asked]
    assert max(gaps) <= 0.25


def test_several_threads_change_nothing() -> None:
    network, rng = decoder("qwen3"), random.Random(0)
    asked = [request(str(n), text(rng, 20), max_tokens=12) for n in range(6)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        made = run(engine(network), *asked)
    finally:
        torch.set_num_threads(before)
    assert max(worst({0: network}, one, made[one.id]) for one in asked) <= 1e-4


def test_new_weights_are_packed_while_the_old_ones_serve(way: str) -> None:
    networks = {0: decoder("qwen2"), 1: decoder("qwen2", seed=1)}
    stepper = Stepper(EngineModel(twin(networks[0])), EngineConfig())
    prepared = stepper._model.prepare(networks[1].state_dict())
    before, after = request("before", [1, 2, 3], max_tokens=8), request("after", [1, 2, 3], max_tokens=8)
    assert worst(networks, before, run(stepper, before)["before"]) <= 1e-4
    stepper.swap(1, prepared)
    assert worst(networks, after, run(stepper, after)["after"]) <= 1e-4


def test_where_operators_are_missing_weights_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operator")

    assert products._can_pack.__wrapped__(torch.float32)
    monkeypatch.setattr(products, "_pack", missing)
    assert not products._can_pack.__wrapped__(torch.float32)


def test_a_changed_parameter_counts_from_the_next_step_on() -> None:
    network = decoder("qwen3")
    model = EngineModel(twin(network))
    stepper = Stepper(model, EngineConfig())
    run(stepper, request("before", [1, 2, 3], max_tokens=4))
    with torch.inference_mode():
        for name, weight in model.network.named_parameters():
            weight.data = 1.5 * weight
            dict(network.named_parameters())[name].mul_(1.5)
    model.weights_changed()
    asked = request("after", [4, 5, 6], max_tokens=8)
    assert worst({0: network}, asked, run(stepper, asked)["after"]) <= 1e-4


def test_a_model_of_another_build_keeps_its_own_pass() -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=48, n_positions=64)
    assert EngineModel(GPT2LMHeadModel(config).eval()).fused is None
