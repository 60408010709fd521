from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.core.errors import ConfigError
from rollart.hardware.devices import CATALOGUE
from rollart.simulator import plots
from rollart.simulator.planner import (
    PlanResult,
    PlanSearch,
    combined,
    differences,
    explanation,
    pareto,
    promising,
    reason,
    search,
)
from rollart.simulator.plans import estimate, means_of, plan_of, splits
from rollart.simulator.result import SimulationResult
from rollart.simulator.scenario import Scenario

pytestmark = pytest.mark.slow


def _scenario(**more: Any) -> Scenario:
    """Long answers, little training: a plan that trains on most of its devices wastes them."""
    return Scenario.model_validate(
        {
            "model": {"name": "qwen3-8b"},
            "pools": {
                "trainer": {"role": "train", "device": "H800", "count": 16},
                "fast": {"role": "generate", "device": "H800", "count": 2},
            },
            "tasks": [{"name": "maths", "max_context": 16384, "sampling": {"max_tokens": 8192}}],
            "rollout": {"trajectory_deadline": 36000},
            "environments": {"processes": 256},
            "training": {"batch_groups": 8, "group_size": 8},
            "simulate": {"workloads": {"maths": {"prompt": 300, "response": {"uniform": [1000, 6000]}}}},
            **more,
        }
    )


@pytest.fixture(scope="module")
def found() -> PlanSearch:
    return search(_scenario(), kinds=["H800", "H20"], steps=2, per_level=1, seeds=2, workers=2)


def test_the_fastest_plan_is_within_budget_and_beats_the_plan_as_given(found: PlanSearch) -> None:
    assert found.given is not None
    assert found.budget == pytest.approx(found.given.price)
    assert all(each.price <= found.budget + 1e-9 for each in found.tried)
    assert found.fastest.step_s < found.given.step_s


def test_the_front_and_the_plan_as_given_are_confirmed_by_another_seed(found: PlanSearch) -> None:
    assert found.given is not None
    assert all(len(each.others) == 1 for each in (*found.front, found.given))
    assert found.fastest.step_s == (found.fastest.result.step_s + found.fastest.others[0]) / 2


def test_the_front_has_an_interval_from_seeds_and_other_constants(found: PlanSearch) -> None:
    assert all(len(each.uncertain) == 1 and each.half_s > 0 for each in found.front)
    assert all(each.uncertain[0] != each.others[0] for each in found.front)


def test_a_cheaper_plan_is_tied_unless_the_fastest_gains_in_every_simulation(found: PlanSearch) -> None:
    best = replace(found.fastest, price=2.0, others=(), uncertain=())
    step = best.result.step_s

    def tied(*others: float) -> list[PlanResult]:
        fast = replace(best, others=tuple(0.99 * each for each in others))
        slow = replace(best, price=1.0, result=replace(best.result, step_s=step / 0.98), others=others)
        search = PlanSearch(10.0, None, [fast, slow], 2)
        assert search.fastest.price == 2.0
        assert ("cannot be distinguished" in explanation(search)) == bool(search.tied)
        return search.tied

    assert tied() == []  # one simulation of each says nothing about chance
    assert tied(step, 2 * step, 3 * step) == []

    unsure = replace(best, price=1.0, result=replace(best.result, step_s=1.3 * step), others=(0.8 * step,))
    search = PlanSearch(10.0, None, [replace(best, others=(step,)), unsure], 2)
    assert [each.price for each in search.tied] == [1.0]
    assert search.recommended.price == 1.0 and "Recommended" in explanation(search)


def test_the_surest_gain_is_recommended_not_the_largest_on_the_average(found: PlanSearch) -> None:
    step = found.fastest.result.step_s

    def plan(price: float, *times: float) -> PlanResult:
        first, *others = (each * step for each in times)
        result = replace(found.fastest.result, step_s=first)
        return replace(found.fastest, price=price, result=result, others=tuple(others), uncertain=())

    given, sure, risky = plan(1.0, 1.0, 1.0, 1.0), plan(2.0, 0.8, 0.81, 0.8), plan(3.0, 0.4, 1.1, 0.6)
    search = PlanSearch(10.0, given, [given, sure, risky], 3)

    assert search.fastest is risky and search.recommended is sure


def test_a_plan_is_explained_by_what_differs_and_what_limits_it(found: PlanSearch) -> None:
    text = explanation(found)

    assert "fewer for training" in reason(found.fastest, found.given)
    assert "The plan as given" in text
    assert "sets the pace" in text


def test_the_picture_is_drawn(found: PlanSearch, tmp_path: Path) -> None:
    plots.plans(found, tmp_path / "plan.png")

    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def _tried(price: float, step_s: float) -> PlanResult:
    result = object.__new__(SimulationResult)
    object.__setattr__(result, "step_s", step_s)
    return PlanResult(plan_of(_scenario()), price, result, "")


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=40))
def test_no_plan_beats_the_front_and_the_front_beats_all_others(points: list[tuple[float, float]]) -> None:
    every = [_tried(*point) for point in points]
    front = pareto(every)

    for ours in front:
        assert not any(
            other.price <= ours.price
            and other.step_s <= ours.step_s
            and (other.price, other.step_s) != (ours.price, ours.step_s)
            for other in every
        )
    for other in every:
        assert any(ours.price <= other.price and ours.step_s <= other.step_s for ours in front)
    assert [each.price for each in front] == sorted(each.price for each in front)


def test_only_changes_that_helped_are_combined() -> None:
    best = _tried(100, 10)
    variants = [
        replace(_tried(100, 8), plan=replace(best.plan, alpha=2)),
        replace(_tried(100, 7), plan=replace(best.plan, alpha=3)),
        replace(_tried(100, 9), plan=replace(best.plan, extra_members=1)),
        replace(_tried(100, 11), plan=replace(best.plan, processes=1)),
    ]

    assert combined(best, variants) == replace(best.plan, alpha=3, extra_members=1)
    assert combined(best, variants[3:]) is None


def test_the_estimate_shows_which_side_of_a_split_is_too_small() -> None:
    scenario, own = _scenario(), plan_of(_scenario())
    means = means_of(scenario)
    more, fewer = (replace(own, engines=(replace(own.engines[0], count=count),)) for count in (16, 1))

    assert estimate(fewer, scenario, means).generate > estimate(fewer, scenario, means).train
    assert estimate(more, scenario, means).generate < estimate(own, scenario, means).generate / 1.5
    assert estimate(more, scenario, means).train == estimate(own, scenario, means).train


def test_promising_plans_come_from_every_level_of_spending() -> None:
    scenario = _scenario()
    plans = promising(scenario, list(splits(scenario, 100.0, ["H800"])), 100.0, per_level=1)

    assert len(plans) == 4
    assert min(plan.price(CATALOGUE) for plan in plans) <= 50 < 85 < max(plan.price(CATALOGUE) for plan in plans)


def test_differences_name_every_change() -> None:
    own = plan_of(_scenario())
    other = replace(own, trainers=8, alpha=2, processes=128, batch_groups=4, group_size=16)

    assert differences(other, own) == [
        "8 H800 fewer for training",
        "alpha 2, so trained data is up to 2 versions old",
        "4 groups of 16",
        "128 processes a task",
    ]
    assert differences(own, own) == []


def test_an_unknown_device_class_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no device class 'H9'"):
        search(_scenario(), kinds=["H9"])


@pytest.mark.parametrize("budget", [-3.0, 0.0, 3.0])
def test_a_budget_that_buys_nothing_is_an_error(budget: float) -> None:
    with pytest.raises(ConfigError, match=f"a budget of {budget:g} buys no trainer"):
        search(_scenario(), budget)
