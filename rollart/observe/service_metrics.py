"""Metrics of the services: environments, rewards, routing, weight swaps. Each adds up events and has a snapshot."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from statistics import fmean

from rollart.core import events as ev
from rollart.observe.aggregates import QuantileSketch
from rollart.observe.snapshot import EnvironmentSummary, RewardSummary, RouteSummary, SwapSummary


@dataclass(slots=True)
class _Environment:
    resets: QuantileSketch = field(default_factory=QuantileSketch)
    hedged: int = 0
    won: int = 0
    retried: int = 0
    killed: int = 0
    quarantined: int = 0


class EnvironmentMetrics:
    """By task: how long resets took, and what was repeated or lost."""

    def __init__(self) -> None:
        self._tasks: defaultdict[str, _Environment] = defaultdict(_Environment)

    def reset(self, event: ev.EnvironmentReset) -> None:
        self._tasks[event.task].resets.add(event.seconds)

    def hedged(self, event: ev.ResetHedged) -> None:
        self._tasks[event.task].hedged += 1
        self._tasks[event.task].won += event.won

    def lost(self, event: ev.EnvironmentLost) -> None:
        self._tasks[event.task].killed += 1
        self._tasks[event.task].retried += event.retried

    def quarantined(self, event: ev.Quarantined) -> None:
        self._tasks[event.task].quarantined += 1

    def snapshot(self) -> tuple[EnvironmentSummary, ...]:
        return tuple(
            EnvironmentSummary(
                task=task,
                resets=one.resets.count,
                reset_s=one.resets.quantiles(),
                hedged=one.hedged,
                won=one.won,
                retried=one.retried,
                killed=one.killed,
                quarantined=one.quarantined,
            )
            for task, one in self._tasks.items()
        )


@dataclass(slots=True)
class _Reward:
    calls: QuantileSketch = field(default_factory=QuantileSketch)
    cold: int = 0
    hedged: int = 0
    retried: int = 0
    failed: int = 0
    billed_s: float = 0.0


class RewardMetrics:
    """By function: how long calls took, what was repeated or failed, and what is billed."""

    def __init__(self) -> None:
        self._functions: defaultdict[tuple[str, str], _Reward] = defaultdict(_Reward)

    def called(self, event: ev.RewardCalled) -> None:
        reward = self._functions[event.function, event.invoker]
        reward.calls.add(event.seconds)
        reward.cold += event.cold
        reward.hedged += event.hedges
        reward.retried += max(0, event.tries - 1)
        reward.failed += event.reason not in ("", ev.RewardCalled.CANCELLED)
        reward.billed_s += event.billed_s

    def snapshot(self) -> tuple[RewardSummary, ...]:
        return tuple(
            RewardSummary(
                function=function,
                invoker=invoker,
                calls=one.calls.count,
                call_s=one.calls.quantiles(),
                cold=one.cold,
                hedged=one.hedged,
                retried=one.retried,
                failed=one.failed,
                billed_s=one.billed_s,
            )
            for (function, invoker), one in self._functions.items()
        )


class RouteMetrics:
    """What the router did: for each task and pool, the requests, their tokens, predicted and actual times, and why."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], _Route] = {}

    def add(self, event: ev.TurnDone) -> None:
        row = self._rows.get((event.task, event.pool))
        if row is None:
            row = self._rows[event.task, event.pool] = _Route()
        row.requests += 1
        row.prefilled += event.prompt - event.cached
        row.cached += event.cached
        row.fetched += event.fetched
        row.decoded += event.tokens
        row.predicted_s += event.predicted_s
        row.actual_s += event.generate_s
        row.why[event.why] += 1

    def snapshot(self) -> tuple[RouteSummary, ...]:
        return tuple(
            RouteSummary(
                task=task,
                pool=pool,
                requests=row.requests,
                prefilled=row.prefilled,
                cached=row.cached,
                fetched=row.fetched,
                decoded=row.decoded,
                predicted_s=row.predicted_s / row.requests,
                actual_s=row.actual_s / row.requests,
                why=dict(row.why.most_common()),
            )
            for (task, pool), row in sorted(self._rows.items())
        )


class _Route:
    __slots__ = ("actual_s", "cached", "decoded", "fetched", "predicted_s", "prefilled", "requests", "why")

    def __init__(self) -> None:
        self.requests = self.prefilled = self.cached = self.fetched = self.decoded = 0
        self.predicted_s = self.actual_s = 0.0
        self.why: Counter[str] = Counter()


class SwapMetrics:
    """What new weights cost the engines, by transport: time to get them, time without steps, time to recompute KV."""

    def __init__(self) -> None:
        self._swaps: dict[tuple[str, str], list[ev.EngineSwapped]] = defaultdict(list)

    def add(self, event: ev.EngineSwapped) -> None:
        self._swaps[event.engine, event.transport].append(event)

    def snapshot(self) -> tuple[SwapSummary, ...]:
        return tuple(
            SwapSummary(
                engine=engine,
                transport=transport,
                number=len(swaps),
                bytes=fmean(swap.bytes for swap in swaps),
                transfer_s=fmean(swap.transfer_s for swap in swaps),
                exposed_s=fmean(swap.exposed_s for swap in swaps),
                recomputed=fmean(swap.recomputed for swap in swaps),
                recompute_s=fmean(swap.recompute_s for swap in swaps),
            )
            for (engine, transport), swaps in self._swaps.items()
        )
