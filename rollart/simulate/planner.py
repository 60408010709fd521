"""The planner: which hardware to buy for a workload, and how to use it.

All splits of the budget on a coarse grid are ranked by averages and the roofline; the most promising at every level of
spending are simulated, in parallel processes; then the fastest hardware is used in other ways, and what helped is put
together. What is told of a plan is always what its own simulations said: one while there are many, and several, with
other seeds, of each that none beats, so that no plan is there by luck.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from rollart.core.errors import ConfigError, RollartError
from rollart.hardware.devices import DeviceClass
from rollart.simulate.estimate import estimate, means_of, transfer_seconds
from rollart.simulate.plans import SPENDING, ClusterPlan, applied, plan_of, splits, variations
from rollart.simulate.result import SimulationResult, price_per_hour
from rollart.simulate.scenario import Scenario
from rollart.simulate.simulation import simulate

WORTH = 0.01  # a way to use hardware must save this share of the step to be kept
TINY = 1e-9
DEADLINE_S = 3600.0
OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan and what its simulation says; `how` tells what makes it special, `transfer_s` how long weights are on the
    way. `others` are the seconds of a step under other seeds."""

    plan: ClusterPlan
    price: float
    result: SimulationResult
    how: str
    transfer_s: float = 0.0
    others: tuple[float, ...] = ()

    @property
    def step_s(self) -> float:
        return (self.result.step_s + sum(self.others)) / (1 + len(self.others))

    @property
    def cost_per_step(self) -> float:
        return self.price * self.step_s / 3600


@dataclass(frozen=True, slots=True)
class PlanSearch:
    """`given` is the scenario's own plan, if it has one within limits; `fastest` the best within the budget."""

    budget: float
    given: PlanResult | None
    tried: list[PlanResult]
    considered: int
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def front(self) -> list[PlanResult]:
        return pareto(self.tried)

    @property
    def fastest(self) -> PlanResult:
        return self.front[-1]


def pareto(tried: Iterable[PlanResult]) -> list[PlanResult]:
    """Those that no other beats in price and time of a step, the cheapest first."""
    front: list[PlanResult] = []
    for each in sorted(tried, key=lambda each: (each.price, each.step_s)):
        if not front or each.step_s < front[-1].step_s:
            front.append(each)
    return front


def search(
    scenario: Scenario,
    budget: float | None = None,
    *,
    kinds: Sequence[str] = (),
    max_devices: Mapping[str, int] | None = None,
    steps: int = 4,
    per_level: int = 3,
    seeds: int = 3,
    workers: int | None = None,
    tell: OnProgress = lambda text: None,
) -> PlanSearch:
    """Within `budget`, by default the price of the scenario's own plan: generate on `kinds`, by default those of its
    pools, on at most `max_devices` of each class. `per_level` splits are simulated at every level of spending; the best
    are simulated with `seeds` seeds."""
    classes, own = scenario.device_classes(), plan_of(scenario)
    if unknown := [kind for kind in (*kinds, *(max_devices or ())) if kind not in classes]:
        raise ConfigError(f"there is no device class {unknown[0]!r}; known are {', '.join(sorted(classes))}")
    around = price_per_hour(scenario, classes) - own.price(classes)
    budget = own.price(classes) + around if budget is None else budget
    money = budget - around
    kinds = sorted(set(kinds or [each.device for each in own.engines]), key=lambda kind: -_keen(classes[kind]))
    asked = _asked(scenario)
    candidates = list(splits(asked, money, kinds, max_devices)) if money > 0 else []
    if not candidates:
        raise ConfigError(f"a budget of {budget:g} buys no trainer and engine of {', '.join(kinds)}; raise --budget")
    chosen = promising(asked, candidates, money, per_level)
    if own.price(classes) <= money + TINY and own not in chosen:
        chosen.insert(0, own)
    with _simulations(asked, steps, workers, tell) as run:
        tried, failed = run([("as given" if plan == own else "", plan) for plan in chosen])
        if not tried:
            raise RollartError(f"no plan could be simulated; the first said: {next(iter(failed.values()), '')}")
        best = min(tried, key=lambda found: found.step_s)
        more, _ = run(list(variations(best.plan)))
        tried += more
        if (joint := combined(best, more)) is not None:
            tried += run([("what helped, together", joint)])[0]
        tried = _confirmed(tried, own, run, range(asked.seed + 1, asked.seed + seeds))
    given = next((found for found in tried if found.plan == own), None)
    return PlanSearch(budget, given, tried, len(candidates), failed)


def _confirmed(tried: list[PlanResult], own: ClusterPlan, run: "RunPlans", seeds: range) -> list[PlanResult]:
    """With the front, and the plan as given, simulated under all `seeds`. What was there by luck falls behind, others
    take its place, until all of the front is confirmed."""
    while seeds:
        front = pareto(tried)
        unsure = [each for each in tried if not each.others and (each in front or each.plan == own)]
        if not unsure:
            break
        plans = [(each.how, each.plan) for each in unsure]
        times = [[found.result.step_s for found in run(plans, seed)[0]] for seed in seeds]
        for each, others in zip(unsure, zip(*times, strict=True), strict=True):
            tried[tried.index(each)] = replace(each, others=others)
    return tried


def promising(
    scenario: Scenario, candidates: Sequence[ClusterPlan], budget: float, per_level: int
) -> list[ClusterPlan]:
    """The fastest by the roofline at every level of spending."""
    means, classes = means_of(scenario), scenario.device_classes()
    ranked = sorted(candidates, key=lambda plan: estimate(plan, scenario, means).step)
    chosen: list[ClusterPlan] = []
    for spend, below in zip(SPENDING, (*SPENDING[1:], 0.0), strict=True):
        level = [plan for plan in ranked if below * budget < plan.price(classes) <= spend * budget + TINY]
        chosen += level[:per_level]
    return chosen


def combined(best: PlanResult, variants: Sequence[PlanResult]) -> ClusterPlan | None:
    """The best plan with everything that made it faster on its own, or none if fewer than two things did."""
    helped = sorted(
        (each for each in variants if each.step_s < best.step_s * (1 - WORTH)), key=lambda each: each.step_s
    )
    changes: dict[str, object] = {}
    for each in helped:
        ours = {key: getattr(each.plan, key) for key in _USES if getattr(each.plan, key) != getattr(best.plan, key)}
        if not ours.keys() & changes.keys():
            changes |= ours
    if len(helped) < 2 or len(changes) < 2:
        return None
    return replace(best.plan, **changes)  # type: ignore[arg-type]


_USES = ("alpha", "extra_members", "batch_groups", "group_size", "processes", "disaggregate")


def _asked(scenario: Scenario) -> Scenario:
    """Without a log, under the schedule that plans are about."""
    asked = scenario if scenario.rollout.preset == "rollart" else scenario.with_preset("rollart")
    return asked.model_copy(update={"simulate": scenario.simulate.model_copy(update={"log": "off"})})


def _lasting(scenario: Scenario, steps: int, alpha: int) -> Scenario:
    """So many steps that count."""
    training = scenario.training.model_copy(update={"steps": 1 + alpha + steps})
    section = scenario.simulate.model_copy(update={"warmup": None, "finite": False})
    return scenario.model_copy(update={"training": training, "simulate": section})


def _keen(device: DeviceClass) -> float:
    """How much more it is for prefill than for decode."""
    return device.tflops / device.bandwidth


class RunPlans(Protocol):
    def __call__(
        self, plans: list[tuple[str, ClusterPlan]], seed: int | None = None
    ) -> tuple[list[PlanResult], dict[str, str]]: ...


@contextmanager
def _simulations(scenario: Scenario, steps: int, workers: int | None, tell: OnProgress) -> Iterator[RunPlans]:
    """Simulates plans side by side. A plan that cannot be is left out, with the reason."""
    transfer_s = transfer_seconds(scenario)
    pool = ProcessPoolExecutor(workers or os.cpu_count(), mp_context=multiprocessing.get_context("spawn"))

    def run(plans: list[tuple[str, ClusterPlan]], seed: int | None = None) -> tuple[list[PlanResult], dict[str, str]]:
        lasting = [_lasting(applied(plan, scenario), steps, plan.alpha) for _, plan in plans]
        futures: list[Future[SimulationResult]] = [pool.submit(simulate, each, seed=seed) for each in lasting]
        tried, failed = [], {}
        for (how, plan), future in zip(plans, futures, strict=True):
            try:
                result = future.result(DEADLINE_S)
            except ConfigError as error:
                failed[plan.split] = str(error)
                tell(f"{plan.split}: cannot be: {error}")
                continue
            tried.append(PlanResult(plan, result.price_per_hour, result, how, transfer_s))
            tell(f"{plan.split}{f' ({how})' if how else ''}: {tried[-1].step_s:.1f} s a step")
        return tried, failed

    try:
        yield run
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
