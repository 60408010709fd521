"""What new weights cost the engines: by the way they came, how long they took, how long no step could run, and how long
steps made KV anew for what was in flight."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich.table import Table

from rollart.core import events as ev
from rollart.observe.snapshot import SwapSummary
from rollart.observe.tables import table


class SwapMetrics:
    def __init__(self) -> None:
        self._swaps: dict[tuple[str, str], list[ev.EngineSwapped]] = defaultdict(list)

    def add(self, event: ev.EngineSwapped) -> None:
        self._swaps[event.engine, event.transport].append(event)

    def snapshot(self) -> tuple[SwapSummary, ...]:
        return tuple(
            SwapSummary(
                engine,
                transport,
                len(swaps),
                _mean(swap.bytes for swap in swaps),
                _mean(swap.transfer_s for swap in swaps),
                _mean(swap.exposed_s for swap in swaps),
                _mean(swap.recomputed for swap in swaps),
                _mean(swap.recompute_s for swap in swaps),
            )
            for (engine, transport), swaps in self._swaps.items()
        )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def weights(swaps: Sequence[SwapSummary]) -> Table:
    rows = table("name", "by", "swaps", "MB", "transfer ms", "exposed ms", "KV anew ms", "tokens in flight")
    for swap in swaps:
        times = f"{1000 * swap.transfer_s:.1f}", f"{1000 * swap.exposed_s:.2f}", f"{1000 * swap.recompute_s:.1f}"
        size = f"{swap.bytes / 2**20:.1f}"
        rows.add_row(swap.engine, swap.transport, str(swap.number), size, *times, f"{swap.recomputed:.0f}")
    return rows
