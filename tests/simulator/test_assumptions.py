"""What a scenario leaves open is printed, and is what `rollart check` assumes."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollart.core.errors import ConfigError
from rollart.placement.workload import shape_of
from rollart.simulator.assumptions import assumptions, device_memory, too_little_memory
from rollart.simulator.distributions import mean_of
from rollart.simulator.scenario import Scenario, load


def scenario(trainers: int = 32, **simulate: Any) -> Scenario:
    return Scenario.model_validate(
        {
            "model": {"name": "qwen3-32b"},
            "pools": {
                "trainer": {"role": "train", "device": "H800", "count": trainers},
                "engines": {"role": "generate", "device": "H20", "engine": "vllm", "tensor_parallel": 2},
            },
            "tasks": [{"name": "maths", "max_context": 8192, "max_turns": 4, "sampling": {"max_tokens": 1024}}],
            "training": {"dtype": "bfloat16", "recompute": "full", "parallel": "auto"},
            "simulate": simulate,
        }
    )


def test_tokens_that_nobody_gave_are_those_that_check_assumes() -> None:
    run = scenario()
    workload, shape = run.workload("maths"), shape_of(run.tasks[0])
    assert (mean_of(workload.observation), mean_of(workload.response)) == (shape.prompt, shape.decode)


def test_every_assumption_names_its_value_and_the_key_that_changes_it() -> None:
    found = {each.key: each.value for each in assumptions(scenario())}
    assert "response 512" in found["simulate.workloads.maths"]
    weights = found["simulate.weights; simulate.constants.push_efficiency, pull_efficiency"]
    assert "0.0195 of ethernet's 25 GB/s" in weights and "s a transfer" in weights
    assert found["simulate.workloads.<task>.step"] == "0 s"
    assert found["engine.max_batch"] == "256" and found["engine.kv_megabytes"] == "90% of memory"
    assert "40 s a step" in found["simulate.constants.train_efficiency, train_fixed_s; simulate.train"]


def test_what_is_given_is_not_assumed() -> None:
    workload = {"turns": 4, "prompt": 100, "observation": 50, "response": 20, "reset": 3, "step": 1, "reward": 0}
    given = scenario(
        workloads={"maths": workload},
        weights={"method": "store", "push": "ethernet", "pull": "measured"},
        links={"measured": 3},
        constants={"push_efficiency": 0.02},
        scoring={"concurrency": 10},
        one_in=1,
        train={"fixed": 3},
        engines={"engines": {"fixed": 0.1, "token": 0}},
    )
    keys = {each.key for each in assumptions(given)}
    assert keys == {"engine.max_batch", "engine.prefill_chunk", "engine.kv_megabytes"}


def test_how_much_of_a_given_link_is_used_is_assumed() -> None:
    given = scenario(weights={"method": "collective", "push": "ethernet", "pull": "ethernet"})
    (weights,) = (each for each in assumptions(given) if each.what == "weights")
    assert weights.key == "simulate.constants.collective_efficiency" and "0.12 of ethernet's" in weights.value


def test_a_run_without_pools_is_simulated_on_the_class_of_its_gpu(tmp_path: Path) -> None:
    run = {
        "model": {"name": "qwen3-8b"},
        "tasks": [{"name": "maths"}],
        "engine": {"device": "cuda"},
        "simulate": {"device": "A100"},
    }
    pools = {
        pool.devices for role in ("train", "generate") for pool in Scenario.model_validate(run).pools_of(role).values()
    }
    assert pools == {("A100",)}
    assert Scenario.model_validate(run).pools_of("environment")["environments"].devices == ("cpu",)
    (tmp_path / "run.yaml").write_text(json.dumps(run | {"simulate": {}}))
    with pytest.raises(ConfigError, match=r"run\.yaml:1: engine\.device is cuda.*simulate\.device: A100"):
        load(tmp_path / "run.yaml")


def test_memory_is_that_of_weights_and_kv_or_what_they_may_fill() -> None:
    found = {name: used for name, (used, _) in device_memory(scenario()).items()}
    assert found["engines"] == 0.9 * 96 and 20 < found["trainer"] < 80


def test_a_trainer_without_the_memory_for_its_model_is_reported_with_what_fits() -> None:
    assert too_little_memory(scenario(trainers=32)) is None
    assert "rollart check" in str(too_little_memory(scenario(trainers=2)))


def test_a_part_that_stands_for_the_fleet_is_an_assumption() -> None:
    whole = scenario()
    part = whole.model_copy(update={"simulate": whole.simulate.model_copy(update={"one_in": 2})})
    assert any(each.key == "simulate.one_in" and "one in 2" in each.value for each in assumptions(part))
