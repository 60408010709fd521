"""What the router did: for each task and pool, the requests, their tokens, predicted and actual times, and why."""

from collections import Counter

from rollart.core import events as ev
from rollart.observe.snapshot import RouteSummary


class RouteMetrics:
    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], _Row] = {}

    def add(self, event: ev.TurnDone) -> None:
        row = self._rows.get((event.task, event.pool))
        if row is None:
            row = self._rows[event.task, event.pool] = _Row()
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


class _Row:
    __slots__ = ("actual_s", "cached", "decoded", "fetched", "predicted_s", "prefilled", "requests", "why")

    def __init__(self) -> None:
        self.requests = self.prefilled = self.cached = self.fetched = self.decoded = 0
        self.predicted_s = self.actual_s = 0.0
        self.why: Counter[str] = Counter()
