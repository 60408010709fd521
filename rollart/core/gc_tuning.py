"""Settings of Python's cyclic garbage collector, for processes with millions of live objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def collect_rarely() -> None:
    """Reference counting frees nearly everything that a controller keeps; scanning it all for the few cycles would cost
    more than scheduling. Young objects are still scanned, old ones rarely: the first threshold is above what thousands
    of trajectories have in flight, or each of their objects would be scanned before its turn is over."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 1_000)


@contextmanager
def disabled() -> Iterator[None]:
    """For work that makes no cycles at all, however long it takes."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
