"""The table of metrics: each is shown on the live view, in `rollart show`, in `summary.json` and in TensorBoard.

A metric reads the events that its sources name and aggregates what they return:

- `rate`: amount per second. Live: over the last half minute; report: over RL; TensorBoard: since the last step.
- `mean`: of the values. Live: of the last 128; report: of all; TensorBoard: of those since the last step.
- `last`: the last value.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from rollart.core import events as ev
from rollart.observe.aggregates import Aggregate, LastValue, MeanValue, RateValue
from rollart.observe.draw import count, percent
from rollart.observe.snapshot import MetricValue, words_of

E = TypeVar("E", bound=ev.Event)


class Amount(NamedTuple):
    """`value` came evenly over `seconds`, which ended `ended_s` before the event."""

    value: float
    seconds: float = 0.0
    ended_s: float = 0.0


Source = tuple[type[ev.Event], Callable[[Any], "Amount | float | None"]]


def on(kind: type[E], value: Callable[[E], Amount | float | None]) -> Source:
    """Take `value` of each event of this kind; None is no value."""
    return kind, value


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """`name` is the key in `Snapshot.metrics`, `StepPoint.metrics` and `summary.json`; `show` makes the text on the
    live view and in the report; `tag` names the scalar of TensorBoard. With a title in `bar`, the report draws a bar
    instead: a share of the time. `live` is what the live view shows: the recent value, or that of all of RL. One
    `of_tokens` is not shown for a run that samples none."""

    name: str
    sources: tuple[Source, ...]
    aggregate: Literal["rate", "mean", "last"]
    show: Callable[[float], str]
    tag: str
    bar: str = ""
    live: Literal["recent", "overall"] = "recent"
    of_tokens: bool = False

    def text(self, values: Mapping[str, MetricValue]) -> str:
        """What the live view shows; nothing before the first value."""
        value = getattr(values[self.name], self.live) if self.name in values else None
        return "" if value is None else self.show(value)


METRICS = [
    Metric(
        name="tokens_per_s",
        sources=(on(ev.TurnDone, lambda turn: Amount(turn.tokens, turn.generate_s, turn.env_s)),),
        aggregate="rate",
        show=lambda rate: f"{count(rate)} tokens/s",
        tag="speed/tokens_per_s",
        of_tokens=True,
    ),
    Metric(
        name="trajectories_per_s",
        sources=(on(ev.TrajectoryEnded, lambda ended: None if ended.held_out else 1),),
        aggregate="rate",
        show=lambda rate: f"{count(rate)} trajectories/s",
        tag="speed/trajectories_per_s",
    ),
    Metric(
        name="trainer_waiting",
        sources=(on(ev.BatchTaken, lambda batch: Amount(batch.waited_s, batch.waited_s)),),
        aggregate="rate",
        show=lambda share: f"trainer waits {percent(min(1.0, share))} of the time",
        tag="busy/trainer_waiting",
        bar="trainer waiting",
        live="overall",
    ),
    Metric(
        name="explained_variance",
        sources=(on(ev.StepDone, lambda step: step.values.get("explained_variance")),),
        aggregate="last",
        show=lambda share: f"critic explains {percent(max(0.0, share))} of the returns",
        tag="critic/explained_variance",
    ),
]


def metrics_of(work: str) -> list[Metric]:
    """Those that a run of this kind of work shows."""
    return [metric for metric in METRICS if words_of(work).tokens or not metric.of_tokens]


_AGGREGATES: dict[str, Callable[[], Aggregate]] = {"rate": RateValue, "mean": MeanValue, "last": LastValue}


class MetricValues:
    """The values of all metrics over one log."""

    def __init__(self) -> None:
        self._aggregates = {metric.name: _AGGREGATES[metric.aggregate]() for metric in METRICS}
        self._sources: dict[type, list[tuple[Aggregate, Callable[[Any], Amount | float | None]]]] = defaultdict(list)
        for metric in METRICS:
            for kind, value in metric.sources:
                self._sources[kind].append((self._aggregates[metric.name], value))

    def fold(self, event: ev.AnyEvent) -> None:
        for aggregate, value in self._sources.get(type(event), ()):
            amount = value(event)
            if amount is not None:
                amount = amount if isinstance(amount, Amount) else Amount(amount)
                aggregate.add(event.t - amount.ended_s, amount.value, amount.seconds)

    def totals(self) -> dict[str, float]:
        return {name: aggregate.total for name, aggregate in self._aggregates.items()}

    def since_step(self, t: float) -> dict[str, float]:
        """The values since this was called before."""
        found = {name: aggregate.since_step(t) for name, aggregate in self._aggregates.items()}
        return {name: value for name, value in found.items() if value is not None}

    def snapshot(self, now: float, rl: Mapping[str, float], rl_s: float) -> dict[str, MetricValue]:
        """`rl` are the totals of RL, which took `rl_s`."""
        return {
            name: MetricValue(aggregate.recent(now), aggregate.overall(rl.get(name, 0.0), rl_s))
            for name, aggregate in self._aggregates.items()
        }
