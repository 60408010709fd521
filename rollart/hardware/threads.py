"""How many CPU threads a process that computes should have."""

import os

TINY = 20_000_000  # parameters; operators of smaller models are over before a second thread has begun
MOST = 8  # more wait for memory, and for each other
RESERVED = 1  # cores for the controller and the environments


def thread_share(cores: float, workers: int, parameters: int) -> int:
    """Threads of each of `workers` that share a machine."""
    if parameters < TINY:
        return 1
    return max(1, min(MOST, int(cores - RESERVED) // max(1, workers)))


def usable_cores() -> int:
    """Of this process, which may be confined to some of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
