import ctypes
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from steppers import engine, run, text
from tiny_decoders import ARCHITECTURES, decoder, request, twin, worst
from transformers import GPT2Config, GPT2LMHeadModel

from rollart.config import EngineConfig
from rollart.engines.torch import kernels
from rollart.engines.torch.fused import FusedDecoder
from rollart.engines.torch.kernels import CompiledKernels, TorchKernels
from rollart.engines.torch.model import EngineModel
from rollart.engines.torch.stepper import Stepper

WAYS = ("compiled", "operators", "network")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The three forward passes of the engine: by our C code, by torch operators, and the network's own."""
    if request.param == "operators":
        monkeypatch.setattr(kernels, "_compiled", lambda *_: None)
    if request.param == "network":
        monkeypatch.setattr(FusedDecoder, "of", lambda *_: None)
    yield request.param


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_three_passes_give_the_logprobs_of_transformers(architecture: str, way: str) -> None:
    network, rng = decoder(architecture), random.Random(0)
    asked = [request(str(n), text(rng, size), max_tokens=30) for n, size in enumerate((3, 40, 90, 300, 7))]
    stepper = engine(network, prefill_chunk=128)
    fused = stepper._model.fused
    expected = {"compiled": CompiledKernels, "operators": TorchKernels}.get(way)
    assert (fused is None) if expected is None else isinstance(fused and fused._kernels, expected)
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


def test_without_a_working_compiler_operators_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for compiler in ("no-such-compiler", shutil.which("false") or "false"):
        monkeypatch.setenv("CC", compiler)
        assert kernels._compiled.__wrapped__(8, 2, False) is None
    monkeypatch.delenv("CC")
    assert isinstance(kernels._compiled.__wrapped__(8, 2, False), ctypes.CDLL)
    [kept] = (tmp_path / "rollart").iterdir()
    assert kept.suffix == ".so"
