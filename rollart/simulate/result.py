"""The result of a simulation: plain numbers, per step after the warmup."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from rollart.config import PoolConfig
from rollart.hardware.devices import DeviceClass
from rollart.rollout.engine_state import EnginePool
from rollart.simulate.scenario import Scenario
from rollart.simulate.tally import Tally

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
class SimulationResult:
    """Times are seconds. A step is from the end of one optimizer step to the end of the next: `wait_s` for its batch,
    `blocked_s` for weights, `train_s`. `exposed` divides the step: each moment counts for the first that applies of
    training alone, generation, reset, environment step, reward. `tokens_per_s` counts all tokens of trained batches."""

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


def price_per_hour(scenario: Scenario, classes: Mapping[str, DeviceClass]) -> float:
    """Of all devices, in prices of the catalogue; those that training and generation share count once."""
    price = 0.0
    for role in ("train", "generate"):
        for pool in scenario.pools_of(role).values():
            if role == "train" and scenario.simulate.colocated:
                continue
            price += classes[pool.devices[0]].price * devices_of(pool)
    scoring = scenario.simulate.scoring
    return price + (classes[scoring.device].price * scoring.devices if scoring.device else 0.0)


def devices_of(pool: PoolConfig) -> int:
    return pool.workers * pool.tensor_parallel


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
    ended, turns = max(1, totals["ended"]), totals["turns"]
    trained = max(1, totals["trained"])
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
        tokens_per_s=totals["trained tokens"] / span,
        answers_per_s=totals["answer tokens"] / span,
        trajectories_per_s=totals["trained"] / span,
        price_per_hour=price,
        cost_per_step=price * span / steps / 3600,
        trainer_use=totals["train"] / span,
        environments_use=totals["environments"]
        / samples
        / max(1, scenario.environments.processes * len(scenario.tasks)),
        reward_use=totals["reward busy"] / span / scoring.concurrency,
        reward_calls=totals["reward calls"] / steps,
        reward_cold=totals["reward cold"] / max(1, totals["reward calls"]),
        turns=turns / ended,
        running=totals["running"] / samples,
        all_turns=tally.totals["turns"],
        events=events,
        exposed={part: totals[f"part {part}"] / samples for part in PARTS},
        trajectory={stage: totals[f"stage {stage}"] / ended for stage in STAGES},
        pools={name: _use(name, pool, totals, span, samples) for name, pool in pools.items()},
        staleness=_named(totals, "age ", lambda age, count: (int(age), count / trained)),
        outcomes=_named(totals, "outcome ", lambda name, count: (name, count)),
        drops=_named(totals, "dropped ", lambda name, count: (name, count)),
        step_times=tuple(tally.step_times),
    )


def _use(name: str, pool: EnginePool, totals: Any, span: float, samples: int) -> PoolUse:
    engines = max(1, len(pool.engines))
    of = engines * span
    prefix = f"idle {name} "
    return PoolUse(
        device=pool.roofline.device.name,
        devices=engines * pool.roofline.devices,
        prefill=totals[f"prefill {name}"] / of,
        decode=totals[f"decode {name}"] / of,
        weights=totals[f"weights {name}"] / of,
        idle={
            key.removeprefix(prefix): n / engines / samples
            for key, n in sorted(totals.items())
            if key.startswith(prefix)
        },
    )


def _named(totals: Mapping[str, Any], prefix: str, make: Any) -> dict[Any, Any]:
    return dict(make(key.removeprefix(prefix), n) for key, n in sorted(totals.items()) if key.startswith(prefix) and n)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95% interval; NaN for a single value."""
    if len(values) < 2:
        return values[0], math.nan
    factor = _T95[len(values) - 1] if len(values) <= len(_T95) else 1.96
    return mean(values), factor * stdev(values) / math.sqrt(len(values))
