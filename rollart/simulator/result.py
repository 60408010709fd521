"""The result of a simulation: plain numbers, per step after the warmup."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from rollart.core import events as ev
from rollart.hardware.devices import DeviceClass
from rollart.rollout.engine_state import EnginePool
from rollart.simulator.scenario import Scenario

STAGES = ("claim", "reset", "queue", "generate", "step", "score")
PARTS = ("generate", "reset", "step", "reward", "train", "weights")
_T95 = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's, by degrees of freedom


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Shares of the time of one pool's devices; `idle` by what they waited for."""

    device: str
    devices: int
    prefill: float
    decode: float
    weights: float
    idle: dict[str, float]

    @property
    def busy(self) -> float:
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class TaskShare:
    """Groups of a task in all batches together: those that were trained, and its share by the weights of the tasks."""

    trained: int
    asked: float


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Times are seconds. A step is from the end of one optimizer step to the end of the next: `wait_s` for its batch,
    `blocked_s` for weights, `train_s`. `exposed` divides the step: moments in which nothing but training goes on,
    resets of batches that start as a whole, and all others by what the trajectories under way do. `tokens_per_s`
    counts all tokens of trained batches, `mfu` is the model FLOPs utilization of the trainer's devices. With
    `simulate.one_in`, rates and counts are those of the whole; `all_turns` and `events` were simulated."""

    name: str
    preset: str
    alpha: int
    seed: int
    steps: int
    counted: int
    seconds: float
    cpu_s: float
    step_s: float
    wait_s: float
    train_s: float
    blocked_s: float
    tokens_per_s: float
    answers_per_s: float
    trajectories_per_s: float
    price_per_hour: float
    cost_per_step: float
    trainer_use: float
    mfu: float
    environments_use: float
    reward_use: float
    reward_calls: float
    reward_cold: float
    turns: float
    running: float
    all_turns: int
    events: int
    exposed: dict[str, float] = field(default_factory=dict)
    trajectory: dict[str, float] = field(default_factory=dict)
    pools: dict[str, PoolUse] = field(default_factory=dict)
    staleness: dict[int, float] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    drops: dict[str, int] = field(default_factory=dict)
    step_times: tuple[float, ...] = ()
    mixture: dict[str, TaskShare] = field(default_factory=dict)

    @property
    def trainer_idle(self) -> float:
        """The share of a step in which the trainer waits for its batch."""
        return self.wait_s / self.step_s


def price_per_hour(scenario: Scenario, classes: Mapping[str, DeviceClass]) -> float:
    """Of all devices, in prices of the catalogue; those that training and generation share count once."""
    scoring = scenario.simulate.scoring
    pools = [] if scenario.simulate.colocated else [*scenario.pools_of("train").values()]
    pools += scenario.pools_of("generate").values()
    price = sum(classes[pool.devices[0]].price * pool.workers * pool.tensor_parallel for pool in pools)
    return price + (classes[scoring.device].price * scoring.devices if scoring.device else 0.0)


class Tally:
    """An event sink that keeps only sums, so memory does not grow. `service_totals` are added when a step ends."""

    def __init__(self, clock: Callable[[], float], warmup: int, service_totals: Callable[[], dict[str, float]]) -> None:
        self.totals: Any = Counter()
        self.step_times: list[float] = []
        self.batches: list[dict[str, int]] = []  # groups of each task
        self._clock, self._warmup, self._service_totals = clock, warmup, service_totals
        self._started: dict[str, float] = {}
        self._before: Counter[str] = Counter()
        self._after: Counter[str] = Counter()

    def emit(self, event: ev.AnyEvent) -> None:
        event.t = self._clock()
        self.fold(event)

    def fold(self, event: ev.AnyEvent) -> None:
        totals = self.totals
        match event:
            case ev.TurnDone():
                totals["turns"] += 1
                totals["answer tokens"] += event.tokens
                totals["stage queue"] += event.queue_s
                totals["stage generate"] += event.generate_s - event.queue_s
                totals["stage step"] += event.env_s
            case ev.TrajectoryStarted():
                self._started[event.trajectory] = event.t
            case ev.EnvironmentReset():
                began = self._started.get(event.trajectory, event.t)
                totals["stage claim"] += max(0.0, event.t - event.seconds - began)
                totals["stage reset"] += event.seconds
            case ev.Scored():
                totals["stage score"] += event.seconds
            case ev.TrajectoryEnded():
                self._started.pop(event.trajectory, None)
                totals["ended"] += 1
                totals[f"outcome {event.outcome.value}"] += 1
            case ev.GroupDropped():
                totals[f"dropped {event.reason}"] += 1
            case ev.BatchTaken():
                self.batches.append(event.groups)
                totals["wait"] += event.waited_s
                totals["trained"] += event.trajectories
                totals["trained tokens"] += event.tokens
                for age, count in event.staleness.items():
                    totals[f"age {age}"] += count
            case ev.StepDone():
                totals["steps"] += 1
                totals["train"] += event.seconds
                self.step_times.append(event.t)
                if event.version == self._warmup:
                    self._before = self._snapshot()
                self._after = self._snapshot()

    @property
    def measured(self) -> Counter[str]:
        """Totals of the steps after the warmup, or of the whole time if no step ended; `t` is that time."""
        if not self.step_times:
            return self._snapshot()
        return Counter({key: self._after[key] - self._before[key] for key in self._after})

    def _snapshot(self) -> Counter[str]:
        return Counter(self.totals) + Counter(self._service_totals()) + Counter({"t": self._clock()})


def result_of(
    scenario: Scenario,
    tally: Tally,
    classes: Mapping[str, DeviceClass],
    pools: Mapping[str, EnginePool],
    seconds: float,
    cpu_s: float,
    events: int,
) -> SimulationResult:
    totals: Any = tally.measured
    steps, span, samples = max(1, totals["steps"]), max(1e-9, totals["t"] or seconds), max(1, totals["samples"])
    scoring, price = scenario.simulate.scoring, price_per_hour(scenario, classes)
    one_in = scenario.simulate.one_in
    ended, processes = max(1, totals["ended"]), max(1, scenario.environments.processes * len(scenario.tasks))
    return SimulationResult(
        name=scenario.name,
        preset=scenario.rollout.preset,
        alpha=scenario.rollout.schedule().alpha,
        seed=scenario.seed,
        steps=len(tally.step_times),
        counted=totals["steps"],
        seconds=seconds,
        cpu_s=cpu_s,
        step_s=span / steps,
        wait_s=totals["wait"] / steps,
        train_s=totals["train"] / steps,
        blocked_s=totals["blocked"] / steps,
        tokens_per_s=one_in * totals["trained tokens"] / span,
        answers_per_s=one_in * totals["answer tokens"] / span,
        trajectories_per_s=one_in * totals["trained"] / span,
        price_per_hour=price,
        cost_per_step=price * span / steps / 3600,
        trainer_use=totals["train"] / span,
        mfu=_mfu(scenario, classes, one_in * totals["trained tokens"] / span),
        environments_use=one_in * totals["environments"] / samples / processes,
        reward_use=one_in * totals["reward busy"] / span / scoring.concurrency,
        reward_calls=one_in * totals["reward calls"] / steps,
        reward_cold=totals["reward cold"] / max(1, totals["reward calls"]),
        turns=totals["turns"] / ended,
        running=one_in * totals["running"] / samples,
        all_turns=tally.totals["turns"],
        events=events,
        exposed={part: totals[f"part {part}"] / samples for part in PARTS},
        trajectory={stage: totals[f"stage {stage}"] / ended for stage in STAGES},
        pools={name: _use(name, pool, totals, span, samples, one_in) for name, pool in pools.items()},
        staleness={int(age): count / max(1, totals["trained"]) for age, count in _named(totals, "age ") if count},
        outcomes={name: one_in * count for name, count in _named(totals, "outcome ") if count},
        drops={reason: one_in * count for reason, count in _named(totals, "dropped ") if count},
        step_times=tuple(tally.step_times),
        mixture=_mixture(scenario, tally.batches),
    )


def _mixture(scenario: Scenario, batches: Sequence[Mapping[str, int]]) -> dict[str, TaskShare]:
    """Of all batches, warmup included: a task's share is exact over all of them, not over any part."""
    plans = {task.name: task.schedule.plan() for task in scenario.tasks if task.schedule is not None}
    asked: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    for number, groups in enumerate(batches):
        weights = {
            task.name: task.weight * (plans[task.name].at(number) if task.name in plans else 1.0)
            for task in scenario.tasks
        }
        trained.update(groups)
        each = sum(groups.values()) / (sum(weights.values()) or 1.0)
        asked.update({task: weight * each for task, weight in weights.items()})
    return {task.name: TaskShare(trained[task.name], asked[task.name]) for task in scenario.tasks}


def _mfu(scenario: Scenario, classes: Mapping[str, DeviceClass], tokens_per_s: float) -> float:
    """FLOPs of the forward and the backward pass over all trained tokens, without attention to their contexts, as a
    share of what the trainer's devices could do in the time of all steps."""
    (train,) = scenario.pools_of("train").values()
    peak = classes[train.devices[0]].tflops * 1e12 * train.count
    return 3 * tokens_per_s * scenario.shape.token_flops / peak


def _use(name: str, pool: EnginePool, totals: Any, span: float, samples: int, one_in: int) -> PoolUse:
    engines = max(1, len(pool.engines))
    shares = {kind: totals[f"{kind} {name}"] / (engines * span) for kind in ("prefill", "decode", "weights")}
    idle = {cause: count / engines / samples for cause, count in _named(totals, f"idle {name} ")}
    return PoolUse(pool.roofline.device.name, one_in * engines * pool.roofline.devices, **shares, idle=idle)


def _named(totals: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The totals whose names begin with `prefix`, without it."""
    return ((key.removeprefix(prefix), n) for key, n in sorted(totals.items()) if key.startswith(prefix))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95% interval; NaN for a single value."""
    if len(values) < 2:
        return values[0], math.nan
    factor = _T95[len(values) - 1] if len(values) <= len(_T95) else 1.96
    return mean(values), factor * stdev(values) / math.sqrt(len(values))


def prediction_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where another such value would be, with 95%; NaN for a single one. Unlike `interval` it does not shrink with the
    number of values: more draws of what is uncertain do not make it certain. Positive values vary by factors."""
    if len(values) < 2:
        return math.nan, math.nan
    if min(values) > 0:
        low, high = _around([math.log(value) for value in values])
        return math.exp(low), math.exp(high)
    low, high = _around(values)
    return max(0.0, low) if min(values) >= 0 else low, high


def _around(values: Sequence[float]) -> tuple[float, float]:
    middle, half = interval(values)
    half *= math.sqrt(len(values) + 1)
    return middle - half, middle + half
