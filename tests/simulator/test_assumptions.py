"""What a scenario leaves open is printed, and is what `rollart check` assumes."""

from typing import Any

from rollart.placement.workload import shape_of
from rollart.simulator.assumptions import assumptions, too_little_memory
from rollart.simulator.distributions import mean_of
from rollart.simulator.scenario import Scenario


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
    assert "ethernet of 25 GB/s" in found["simulate.weights"] and "s a transfer" in found["simulate.weights"]


def test_what_is_given_is_not_assumed() -> None:
    tokens = {"turns": 4, "prompt": 100, "observation": 50, "response": 20}
    weights = {"method": "store", "push": "ethernet", "pull": "infiniband"}
    keys = {each.key for each in assumptions(scenario(workloads={"maths": tokens}, weights=weights))}
    assert not any(key.startswith(("simulate.workloads", "simulate.weights")) for key in keys)


def test_a_trainer_without_the_memory_for_its_model_is_reported_with_what_fits() -> None:
    assert too_little_memory(scenario(trainers=32)) is None
    assert "rollart check" in str(too_little_memory(scenario(trainers=2)))
