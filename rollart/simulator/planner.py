"""The planner: which hardware to buy for a workload, and how to use it.

All splits of the budget on a coarse grid are ranked by averages and the roofline; the most promising at every level of
spending are simulated, in parallel processes; then other uses of the fastest hardware are tried, and those that help
are combined. The numbers of a plan are always from its own simulations: one for most plans, several for the Pareto
front, so that no plan is there by chance. In the end those are simulated with other constants within their uncertainty
too, the same for all plans, so that two plans are compared under the same conditions.
"""

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from rollart.core.errors import ConfigError, RollartError
from rollart.hardware.devices import DeviceClass
from rollart.simulator.plans import (
    SPENDING,
    ClusterPlan,
    applied,
    estimate,
    means_of,
    plan_of,
    splits,
    transfer_seconds,
    variations,
)
from rollart.simulator.result import SimulationResult, interval, prediction_interval, price_per_hour
from rollart.simulator.scenario import Scenario
from rollart.simulator.simulation import simulate

MIN_GAIN = 0.01  # share of the step that another use of the hardware must save
TINY = 1e-9
_BUSY = 0.85  # share of the time from which a device sets the pace
_SAME = 0.02  # relative difference that is not worth a word
DEADLINE_S = 3600.0
OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan and its simulation; `how` says what is special about it. `transfer_s` is the time of a weight transfer,
    `others` are the seconds of a step under other seeds, `uncertain` those under other seeds and constants."""

    plan: ClusterPlan
    price: float
    result: SimulationResult
    how: str
    transfer_s: float = 0.0
    others: tuple[float, ...] = ()
    uncertain: tuple[float, ...] = ()

    @property
    def times(self) -> tuple[float, ...]:
        return (self.result.step_s, *self.others, *self.uncertain)

    @property
    def step_s(self) -> float:
        return (self.result.step_s + sum(self.others)) / (1 + len(self.others))

    @property
    def half_s(self) -> float:
        """Half of the 95% interval of the seconds of a step; NaN for one simulation."""
        low, high = prediction_interval(self.times)
        return (high - low) / 2

    def gain_over(self, other: "PlanResult") -> tuple[float, float]:
        """By which share its steps are shorter, and half of the 95% interval of that, over the same simulations."""
        return interval([1 - ours / theirs for ours, theirs in zip(self.times, other.times, strict=False)])

    @property
    def cost_per_step(self) -> float:
        return self.price * self.step_s / 3600


@dataclass(frozen=True, slots=True)
class PlanSearch:
    """`given` is the scenario's own plan, if it is within the limits; `fastest` has the shortest steps on the average.
    `recommended` has the largest sure gain: the share by which its steps are shorter, with 95%, than those of the plan
    as given, or of the cheapest. Of plans without one, the reference itself is recommended."""

    budget: float
    given: PlanResult | None
    tried: list[PlanResult]
    considered: int
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def front(self) -> list[PlanResult]:
        return pareto(self.tried)

    def sure_gain(self, each: PlanResult) -> float:
        gain, half = each.gain_over(self.given or self.front[0])
        return gain if math.isnan(half) else gain - half

    @property
    def fastest(self) -> PlanResult:
        return self.front[-1]

    @property
    def recommended(self) -> PlanResult:
        return max(self.front, key=self.sure_gain)

    @property
    def tied(self) -> list[PlanResult]:
        """Cheaper plans of the front that cannot be distinguished from the fastest, the cheapest first."""
        gains = ((each, *self.fastest.gain_over(each)) for each in self.front[:-1])
        return [each for each, gain, half in gains if not math.isnan(half) and gain <= half]


def pareto(tried: Iterable[PlanResult]) -> list[PlanResult]:
    """The plans that no other beats in both price and time of a step, the cheapest first."""
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
    on_progress: OnProgress = lambda text: None,
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
    kinds = sorted(set(kinds or [each.device for each in own.engines]), key=lambda kind: -_intensity(classes[kind]))
    base = _base(scenario)
    candidates = list(splits(base, money, kinds, max_devices)) if money > 0 else []
    if not candidates:
        raise ConfigError(f"a budget of {budget:g} buys no trainer and engine of {', '.join(kinds)}; raise --budget")
    chosen = promising(base, candidates, money, per_level)
    if own.price(classes) <= money + TINY and own not in chosen:
        chosen.insert(0, own)
    with _simulations(base, steps, workers, on_progress) as run:
        tried, failed = run([("as given" if plan == own else "", plan) for plan in chosen])
        if not tried:
            raise RollartError(f"no plan could be simulated; the first error: {next(iter(failed.values()), '')}")
        best = min(tried, key=lambda found: found.step_s)
        more, _ = run(list(variations(best.plan)))
        tried += more
        if (joint := combined(best, more)) is not None:
            tried += run([("what helped, together", joint)])[0]
        others = range(base.seed + 1, base.seed + seeds)
        tried = _confirmed(tried, own, run, others)
        tried = _with_other_constants(tried, own, run, others)
    given = next((found for found in tried if found.plan == own), None)
    return PlanSearch(budget, given, tried, len(candidates), failed)


def _confirmed(tried: list[PlanResult], own: ClusterPlan, run: "RunPlans", seeds: range) -> list[PlanResult]:
    """Simulate the front and the plan as given under all `seeds`. Plans that were on it by chance fall behind and
    others take their place, until the whole front is confirmed."""
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


def _with_other_constants(tried: list[PlanResult], own: ClusterPlan, run: "RunPlans", seeds: range) -> list[PlanResult]:
    """The front and the plan as given, simulated with other constants too: one draw for each seed."""
    front = pareto(tried)
    shown = [each for each in tried if each in front or each.plan == own]
    plans = [(each.how, each.plan) for each in shown]
    times = [[found.result.step_s for found in run(plans, seed, uncertain=True)[0]] for seed in seeds]
    for each, uncertain in zip(shown, zip(*times, strict=True), strict=False):
        tried[tried.index(each)] = replace(each, uncertain=uncertain)
    return tried


def promising(
    scenario: Scenario, candidates: Sequence[ClusterPlan], budget: float, per_level: int
) -> list[ClusterPlan]:
    """The fastest plans by the roofline at every level of spending."""
    means, classes = means_of(scenario), scenario.device_classes()
    ranked = sorted(candidates, key=lambda plan: estimate(plan, scenario, means).step)
    chosen: list[ClusterPlan] = []
    for spend, below in zip(SPENDING, (*SPENDING[1:], 0.0), strict=True):
        level = [plan for plan in ranked if below * budget < plan.price(classes) <= spend * budget + TINY]
        chosen += level[:per_level]
    return chosen


def combined(best: PlanResult, variants: Sequence[PlanResult]) -> ClusterPlan | None:
    """The best plan with every change that made it faster on its own; None for fewer than two."""
    helped = sorted(
        (each for each in variants if each.step_s < best.step_s * (1 - MIN_GAIN)), key=lambda each: each.step_s
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


def _base(scenario: Scenario) -> Scenario:
    """The scenario without a log, under the rollart preset."""
    base = scenario if scenario.rollout.preset == "rollart" else scenario.with_preset("rollart")
    return base.model_copy(update={"simulate": scenario.simulate.model_copy(update={"log": "off"})})


def _with_steps(scenario: Scenario, steps: int, alpha: int) -> Scenario:
    """With `steps` steps after the warmup."""
    training = scenario.training.model_copy(update={"steps": 1 + alpha + steps})
    section = scenario.simulate.model_copy(update={"warmup": None, "finite": False})
    return scenario.model_copy(update={"training": training, "simulate": section})


def _intensity(device: DeviceClass) -> float:
    """FLOPs per byte: how well it suits prefill rather than decode."""
    return device.tflops / device.bandwidth


class RunPlans(Protocol):
    def __call__(
        self, plans: list[tuple[str, ClusterPlan]], seed: int | None = None, uncertain: bool = False
    ) -> tuple[list[PlanResult], dict[str, str]]: ...


@contextmanager
def _simulations(scenario: Scenario, steps: int, workers: int | None, on_progress: OnProgress) -> Iterator[RunPlans]:
    """Simulates plans in parallel. An invalid plan is left out, with the reason."""
    transfer_s = transfer_seconds(scenario)
    pool = ProcessPoolExecutor(workers or os.cpu_count(), mp_context=multiprocessing.get_context("spawn"))

    def run(
        plans: list[tuple[str, ClusterPlan]], seed: int | None = None, uncertain: bool = False
    ) -> tuple[list[PlanResult], dict[str, str]]:
        base = scenario.with_other_constants(seed or 0) if uncertain else scenario
        scenarios = [_with_steps(applied(plan, base), steps, plan.alpha) for _, plan in plans]
        futures: list[Future[SimulationResult]] = [pool.submit(simulate, each, seed=seed) for each in scenarios]
        tried, failed = [], {}
        for (how, plan), future in zip(plans, futures, strict=True):
            try:
                result = future.result(DEADLINE_S)
            except ConfigError as error:
                failed[plan.split] = str(error)
                on_progress(f"{plan.split}: invalid: {error}")
                continue
            tried.append(PlanResult(plan, result.price_per_hour, result, how, transfer_s))
            on_progress(f"{plan.split}{f' ({how})' if how else ''}: {tried[-1].step_s:.1f} s per step")
        return tried, failed

    try:
        yield run
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# Explanations

_STAGES = {
    "claim": "waiting for a process",
    "reset": "reset",
    "queue": "waiting for an engine",
    "generate": "generation",
    "step": "environment steps",
    "score": "reward",
}


def reason(tried: PlanResult, given: PlanResult | None) -> str:
    """One sentence or two."""
    parts = [_limit(tried)]
    if given is not None and tried is not given:
        if changes := differences(tried.plan, given.plan):
            parts.insert(0, ", ".join(changes))
        parts.append(_gain(tried, given))
    return "; ".join(parts)


def differences(plan: ClusterPlan, given: ClusterPlan) -> list[str]:
    """What differs from the plan as given."""
    found = []
    if moved := plan.trainers - given.trainers:
        found.append(f"{abs(moved)} {plan.trainer} {'more' if moved > 0 else 'fewer'} for training")
    more = plan.generators
    more.subtract(given.generators)
    found += [f"{abs(n)} {kind} {'more' if n > 0 else 'fewer'} for generation" for kind, n in sorted(more.items()) if n]
    if plan.alpha != given.alpha:
        found.append(f"alpha {plan.alpha}, so trained data is up to {plan.alpha} versions old")
    if plan.extra_members != given.extra_members:
        found.append(f"{plan.extra_members} extra members a group")
    if plan.group_size != given.group_size:
        found.append(f"{plan.batch_groups} groups of {plan.group_size}")
    if plan.processes != given.processes:
        found.append(f"{plan.processes} processes a task")
    if plan.disaggregate != given.disaggregate:
        pair = f"prefill on {plan.engines[0].device}, decode on {plan.engines[1].device}" if plan.disaggregate else ""
        found.append(pair or "no pairs of prefill and decode")
    return found


def explanation(search: PlanSearch) -> str:
    """The fastest plan, in full sentences."""
    best, given = search.fastest, search.given
    pools = ", ".join(f"{name} {use.busy:.0%}" for name, use in best.result.pools.items())
    lines = [
        f"The fastest within {search.budget:g}: {best.plan.split}; alpha {best.plan.alpha}, {best.plan.extra_members} "
        f"extra members, {best.plan.batch_groups} groups of {best.plan.group_size}, "
        f"{best.plan.processes} processes a task.",
        f"It takes {best.step_s:.1f} s per step for {best.price:.4g} per hour: the trainer is busy "
        f"{best.result.trainer_use:.0%} of the time, engines: {pools}. {_limit(best).capitalize()}.",
    ]
    for each in search.tied[:1]:
        gain, half = best.gain_over(each)
        lines.append(
            f"It cannot be distinguished from {each.plan.split}, for {each.price:.4g}: it gains {gain:.0%} "
            f"+- {half:.0%} "
            f"over {len(each.times)} simulations with other seeds and constants. Take the cheaper, or more --seeds."
        )
    if (safe := search.recommended) is not best:
        lines.append(f"Recommended, as its gain is the surest: {safe.plan.split}, for {safe.price:.4g}.")
    if given is not None and best is not given:
        lines.append(
            f"The plan as given takes {given.step_s:.1f} s for {given.price:.4g}: there, {_limit(given)}. "
            f"The difference: {', '.join(differences(best.plan, given.plan)) or 'none'}."
        )
        if best.plan.alpha > given.plan.alpha or best.plan.group_size != given.plan.group_size:
            lines.append("Staleness and group size also change what a step learns, which is not simulated.")
    elif given is not None:
        lines.append("It is the plan as given.")
    return "\n".join(lines)


def _limit(tried: PlanResult) -> str:
    """What limits its step time."""
    result = tried.result
    if result.trainer_use >= _BUSY:
        return f"training sets the pace ({result.trainer_use:.0%} busy)"
    busiest = max(result.pools.items(), key=lambda item: item[1].busy)
    if busiest[1].busy >= _BUSY:
        return f"generation sets the pace ({busiest[0]} {busiest[1].busy:.0%} busy, trainer {result.trainer_use:.0%})"
    stages = {_STAGES[name]: seconds for name, seconds in result.trajectory.items()}
    stages["weight transfer"] = tried.transfer_s
    longest = sorted((name for name in stages if stages[name] > 0), key=lambda name: -stages[name])[:2]
    stage_times = " and ".join(f"{name} {stages[name]:.0f} s" for name in longest)
    waits = f"the trainer waits {min(1.0, result.wait_s / result.step_s):.0%} of a step for the slowest of its batch"
    return f"waiting, not devices, sets the pace: {waits}; on average, most of it {stage_times}"


def _gain(tried: PlanResult, given: PlanResult) -> str:
    factor, price = given.step_s / tried.step_s, tried.price / given.price - 1
    speed = f"{factor:.2f}x as fast" if abs(factor - 1) > _SAME else "as fast"
    if abs(price) <= _SAME:
        return f"{speed} for the same price"
    return f"{speed} for {abs(price):.0%} {'more' if price > 0 else 'less'}"
