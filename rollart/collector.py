"""Python's cyclic garbage collector, told to keep out of the way of a controller with millions of live objects."""

import gc


def calm() -> None:
    """Nearly everything a controller keeps is freed by reference counting; walking through all of it again and again to
    find the few cycles would cost more than scheduling. Young objects are still looked at, old ones rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 1_000)
