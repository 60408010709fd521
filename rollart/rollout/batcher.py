"""Which ready groups make the next batch: in start order, within a window, in the exact mixture."""

from collections.abc import Iterable, Mapping
from itertools import islice

from rollart.rollout.groups import Group


def choose(quota: Mapping[str, int], groups: Mapping[str, Mapping[str, Group]], window: float) -> list[Group] | None:
    """The batch, or None while some task cannot fill its share.

    `groups` are the open ones of each task in start order. Of these only the first `window` x quota compete, so a short
    group cannot overtake for ever: with window 1 the order is strict, with a window as wide as the pipeline whatever is
    ready goes.
    """
    batch: list[Group] = []
    for task, need in quota.items():
        reach = max(need, int(need * window))
        ready = _first(need, islice(groups[task].values(), reach), reach - need)
        if len(ready) < need:
            return None
        batch += ready
    return batch


def _first(need: int, groups: Iterable[Group], spare: int) -> list[Group]:
    """The first ready ones, or fewer once more than `spare` are not: this is asked whenever a group becomes ready."""
    ready: list[Group] = []
    for group in groups:
        if len(ready) == need:
            break
        if group.ready:
            ready.append(group)
        elif (spare := spare - 1) < 0:
            break
    return ready
