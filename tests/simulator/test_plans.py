from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.hardware.devices import CATALOGUE
from rollart.simulator.plans import applied, as_values, min_parallel, plan_of, splits, variations
from rollart.simulator.scenario import Scenario


def scenario(**more: Any) -> Scenario:
    return Scenario.model_validate(
        {
            "model": {"name": "qwen3-8b"},
            "pools": {
                "trainer": {"role": "train", "device": "H800", "count": 8},
                "fast": {"role": "generate", "device": "H800", "count": 8},
                "wide": {"role": "generate", "device": "H20", "count": 8},
            },
            "tasks": [{"name": "maths", "max_context": 8192, "sampling": {"max_tokens": 4096}, "affinity": ["wide"]}],
            "environments": {"processes": 512},
            "training": {"batch_groups": 8, "group_size": 8},
            **more,
        }
    )


@settings(max_examples=50)
@given(budget=st.floats(0, 400), max_devices=st.dictionaries(st.sampled_from(["H800", "H20"]), st.integers(0, 64)))
def test_no_split_exceeds_the_budget_or_the_available_devices(budget: float, max_devices: dict[str, int]) -> None:
    for plan in splits(scenario(), budget, ["H800", "H20"], max_devices):
        assert plan.price(CATALOGUE) <= budget + 1e-9
        devices = plan.generators + Counter({plan.trainer: plan.trainers})
        assert all(count <= max_devices.get(device, count) for device, count in devices.items())
        assert plan.trainers >= 1
        assert plan.engines


def test_splits_are_all_different_and_cover_small_to_large_shares_of_training() -> None:
    plans = list(splits(scenario(), 300.0, ["H800", "H20"]))
    shares = [plan.trainers * CATALOGUE["H800"].price / plan.price(CATALOGUE) for plan in plans]

    assert len({(plan.trainers, plan.engines) for plan in plans}) == len(plans) > 50
    assert min(shares) < 0.1
    assert max(shares) > 0.45


def test_a_plan_applied_to_its_own_scenario_changes_nothing() -> None:
    own = scenario()

    assert applied(plan_of(own), own).pools_of("generate").keys() == {"fast", "wide"}
    assert plan_of(applied(plan_of(own), own)) == plan_of(own)


def test_a_plan_survives_the_round_trip_through_a_scenario() -> None:
    own = scenario()
    for plan in list(splits(own, 120.0, ["H800", "H20"]))[::7]:
        for _, used in variations(plan):
            assert plan_of(applied(used, own)) == used


def test_tasks_are_pinned_only_to_pools_that_a_plan_has() -> None:
    own = scenario()
    only = next(iter(splits(own, 40.0, ["H800"])))

    assert applied(only, own).tasks[0].affinity == "auto"
    assert applied(plan_of(own), own).tasks[0].affinity == ["wide"]


def test_variations_keep_the_hardware_and_the_trajectories_of_a_batch() -> None:
    plan = plan_of(scenario())
    for name, other in variations(plan):
        assert other != plan, name
        assert other.engines == plan.engines
        assert other.batch_groups * other.group_size == plan.batch_groups * plan.group_size


def test_a_model_too_large_for_one_device_gets_as_many_as_it_needs() -> None:
    large = scenario(model={"name": "qwen3-235b-a22b"})

    assert min_parallel(large, "H800") == 8  # one, as the scenario says, does not hold it
    assert min_parallel(large, "H100") == 8
    assert min_parallel(scenario(), "H100") == 1


def test_a_plan_needs_named_devices() -> None:
    with pytest.raises(ConfigError, match="give every pool a device class"):
        plan_of(scenario(pools={"fast": {"role": "generate"}}, tasks=[{"name": "maths"}]))


def test_plans_of_a_fleet_that_is_simulated_in_part_have_multiples_of_its_engines() -> None:
    own = scenario(simulate={"one_in": 4})
    plans = list(splits(own, 300.0, ["H800", "H20"], {"H800": 64, "H20": 30}))
    assert len(plans) > 10
    assert all(engines.count % 4 == 0 for plan in plans for engines in plan.engines)
    assert all(applied(plan, own).simulate.one_in == 4 for plan in plans)
    (halved,) = (used for name, used in variations(plan_of(own)) if name == "groups of 4")
    assert (halved.batch_groups, applied(halved, own).simulate.one_in) == (16, 4)
    odd = replace(plan_of(own), batch_groups=6)
    assert applied(odd, own).simulate.one_in == 2
    assert applied(odd, own).thinned().training.batch_groups == 3


def test_a_written_plan_gives_engines_the_limits_that_it_was_simulated_with() -> None:
    engine = as_values(scenario())["engine"]
    assert (engine["max_batch"], engine["prefill_chunk"]) == (256, 2048)
    assert engine["kv_megabytes"] << 20 == pytest.approx(0.9 * 80e9 - scenario().shape.parameters * 2, rel=1e-4)  # H800
    assert as_values(scenario(engine={"kv_megabytes": 4096}))["engine"]["kv_megabytes"] == 4096
