"""New weights between two steps."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from steppers import engine, run
from tiny_decoders import decoder, request, twin, worst
from torch import Tensor

from rollart.config import EngineConfig
from rollart.core.errors import EngineFailed
from rollart.engines.torch.model import EngineModel
from rollart.engines.torch.stepper import Stepper


def test_kv_kept_over_a_swap_is_the_old_one_and_recomputed_kv_is_the_new_one() -> None:
    networks = {0: decoder(seed=1), 1: decoder(seed=2)}
    gaps = {}
    for choice in ("recompute", "keep"):
        stepper = engine(networks[0], on_swap=choice)
        asked = request("1", list(range(30)), max_tokens=30, seed=1)
        stepper.add(stepper.accept(asked))
        for _ in range(10):
            stepper.step()
        stepper.swap(1, stepper._model.prepare(networks[1].state_dict()))
        done = run(stepper)["1"]
        assert done.versions == [0] * 10 + [1] * 20
        assert stepper.status().prefilled == 30 + (40 if choice == "recompute" else 0)
        gaps[choice] = worst(networks, asked, done)
    assert gaps["recompute"] <= 1e-4 < gaps["keep"]


def test_a_swap_reports_the_kv_recomputed_after_the_previous_one() -> None:
    network = decoder()
    costs = {}
    for choice in ("recompute", "keep"):
        stepper = engine(network, on_swap=choice)
        run(stepper, request("kept", list(range(40)), max_tokens=4, session="kept"))
        stepper.add(stepper.accept(request("running", list(range(30)), max_tokens=30)))
        for _ in range(5):
            stepper.step()
        weights = stepper._model.prepare(network.state_dict())
        assert stepper.swap(1, weights).recompute_s == 0
        before = stepper.status()
        run(stepper)
        after_running = stepper.swap(2, weights).recompute_s
        run(stepper, request("again", [*range(40), 1, 2, 3], max_tokens=4, session="kept"))
        costs[choice] = after_running, stepper.swap(3, weights).recompute_s
        assert all(cost <= stepper.status().busy_s - before.busy_s for cost in costs[choice])
    assert all(cost > 0 for cost in costs["recompute"])
    assert costs["keep"] == (0, 0)


def test_a_swap_that_drains_waits_for_what_runs_and_lets_nothing_in_before_it() -> None:
    networks = {0: decoder(seed=1), 1: decoder(seed=2)}
    stepper = engine(networks[0], on_swap="drain")
    asked = [request(name, list(range(20)), max_tokens=tokens, seed=1) for name, tokens in (("a", 5), ("b", 9))]
    for one in asked:
        stepper.add(stepper.accept(one))
    for _ in range(3):
        stepper.step()
    swapped = []
    weights = stepper._model.prepare(networks[1].state_dict())
    stepper.when_empty(lambda: swapped.append(stepper.swap(1, weights)))
    late = request("late", list(range(20)), max_tokens=4, seed=1)
    done = run(stepper, late)
    assert [set(done[name].versions) for name in ("a", "b", "late")] == [{0}, {0}, {1}]
    assert max(worst(networks, one, done[one.id]) for one in [*asked, late]) <= 1e-4
    [loaded] = swapped
    assert loaded.recomputed == 0 and loaded.exposed_s > 0
    assert not stepper.busy


def test_an_idle_engine_drains_at_once() -> None:
    stepper = engine(decoder(), on_swap="drain")
    swapped = []
    stepper.when_empty(lambda: swapped.append(True))
    assert stepper.busy
    stepper.step()
    assert swapped and not stepper.busy


def test_weights_of_another_model_are_refused_before_they_touch_anything() -> None:
    model = EngineModel(decoder())
    good = decoder(seed=5).state_dict()
    for bad, reason in (
        ({**good, "extra": torch.zeros(1)}, "none of that name"),
        ({**good, "model.norm.weight": torch.zeros(3)}, r"of shape \[3\] where the model has \[32\]"),
        ({name: tensor for name, tensor in good.items() if name != "model.norm.weight"}, "lack model.norm.weight"),
    ):
        with pytest.raises(EngineFailed, match=reason):
            model.prepare(bad)


def test_tied_weights_may_come_under_one_name() -> None:
    tied = {name: tensor for name, tensor in decoder(seed=5).state_dict().items() if name != "lm_head.weight"}
    model = EngineModel(decoder())
    model.replace(model.prepare(tied))
    assert torch.equal(model.network.lm_head.weight, decoder(seed=5).lm_head.weight)


def adapter_of(network: Any, seed: int) -> dict[str, Tensor]:
    """As it is published, of every linear layer."""
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in network.state_dict().items():
        if name.endswith("_proj.weight"):
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{layer}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=draw) / 8
            tensors[f"{layer}.lora_B.weight"] = torch.randn(weight.shape[0], 4, generator=draw) / 8
    return tensors


@torch.no_grad()
def with_adapter(network: Any, adapter: Mapping[str, Tensor], scale: float) -> Any:
    merged = twin(network)
    for name, weight in merged.state_dict().items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in adapter:
            added = scale * adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
            weight.copy_((weight.float() + added).to(weight.dtype))
    return merged


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_adapters_are_swapped_in_flight_and_always_added_to_the_first_weights(architecture: str) -> None:
    network = decoder(architecture, seed=1)
    adapters = {version: adapter_of(network, version) for version in (1, 2, 3)}
    networks = {0: network} | {version: with_adapter(network, each, 0.5) for version, each in adapters.items()}
    stepper = Stepper(EngineModel(twin(network), adapter_scale=0.5), EngineConfig())
    asked = request("1", list(range(30)), max_tokens=40, seed=1)
    stepper.add(stepper.accept(asked))
    for version, adapter in adapters.items():
        for _ in range(10):
            stepper.step()
        assert stepper.swap(version, stepper._model.prepare(adapter)).recomputed == 29 + 10 * version
    done = run(stepper)["1"]
    assert done.versions == [0] * 10 + [1] * 10 + [2] * 10 + [3] * 10
    assert worst(networks, asked, done) <= 1e-4


def test_an_adapter_of_another_model_is_refused() -> None:
    network = decoder()
    adapter = {name.replace("q_proj", "c_attn"): tensor for name, tensor in adapter_of(network, 1).items()}
    with pytest.raises(EngineFailed, match=r"changes 'model\.layers\.0\.self_attn\.c_attn\.weight', which the model"):
        EngineModel(twin(network)).prepare(adapter)
