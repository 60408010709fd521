"""Python's cyclic garbage collector, told to keep out of the way of a controller with millions of live objects."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def calm() -> None:
    """Nearly everything a controller keeps is freed by reference counting; walking through all of it again and again to
    find the few cycles would cost more than scheduling. Young objects are still looked at, old ones rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 1_000)


@contextmanager
def off() -> Iterator[None]:
    """For work that makes no cycles at all, however long it goes on."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
