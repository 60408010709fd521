"""What a piece of work takes, measured in a process of its own."""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

Work = Callable[[], object]


class Cost(Struct, frozen=True):
    """`cpu_s` is the median of the repetitions after the first, `peak_mb` the peak above what was there when they began
    and `rss_mb` the whole peak."""

    cpu_s: float
    peak_mb: float
    rss_mb: float


def measure(prepare: Callable[..., Work], *args: Any, repeats: int = 3) -> Cost:
    """`prepare(*args)` makes the work in the new process; only the work is measured."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # tensors are mapped: freed ones leave the process
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rollart.training.trainer", "transformers.models.auto.modeling_auto"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, prepare, args, repeats))
    process.start()
    sender.close()
    try:
        cost: Cost = receiver.recv()
    except EOFError:
        raise SystemExit(f"the process that measures {prepare.__name__} failed") from None
    process.join()
    return cost


def _run(sender: Any, prepare: Callable[..., Work], args: tuple[Any, ...], repeats: int) -> None:
    work = prepare(*args)
    work()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before, times = _status("VmRSS"), []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    peak = _status("VmHWM")
    sender.send(Cost(statistics.median(times), (peak - before) / 1e6, peak / 1e6))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])
