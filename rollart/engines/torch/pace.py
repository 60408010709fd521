"""Emulation: steps and KV transfers take as long as they would on another device.

A step waits only for what its real time leaves of the emulated one. A step that takes longer than there is late; the
steps after it make up for up to `CREDIT_S`, so that the average speed is right; what they cannot make up is counted.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence

from rollart.engines.torch.batch import BatchState, Chunk
from rollart.hardware.roofline import Roofline, Work, decode, prefill

CREDIT_S = 0.05


def emulation_label(emulate: Roofline) -> str:
    return f"{emulate.device.name}, {emulate.slowdown:g} times slower"


def work_of(batch: BatchState, chunks: Sequence[Chunk]) -> Work:
    """Work of the next step: a token of each decoding sequence, which also attends to itself, and the chunks."""
    decoding = batch.running[: batch.decoding]
    work = decode(len(decoding), sum(sequence.computed + 1 for sequence in decoding))
    for chunk in chunks:
        work += prefill(chunk.count, chunk.start)
    return work


class Pacer:
    """For the stepping thread; only `stop` may be called from another. `wait` sleeps, or ends early after `stop`."""

    def __init__(
        self,
        roofline: Roofline,
        *,
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self.late_s = 0.0
        self._roofline = roofline
        self._clock = clock
        self._over = threading.Event()
        self._wait = wait or self._over.wait
        self._due = -math.inf
        self._debt = 0.0

    def pace(self, began: float, work: Work) -> None:
        """Call when a step that `began` then is computed; returns when the device would be done too.

        Steps follow each other without a gap, so a step begins there when the one before it was due.
        """
        start = began if self._due == -math.inf else self._due
        self._due = start + self._roofline.seconds(work)
        left = self._due - self._clock()
        if left > 0:
            self._wait(left)
        self._debt = max(self._clock() - self._due, 0.0)
        if self._debt > CREDIT_S:
            self.late_s += self._debt - CREDIT_S
            self._due += self._debt - CREDIT_S
            self._debt = CREDIT_S

    def rest(self) -> None:
        """The engine is idle: the next step starts a new schedule, and what was late stays late."""
        self.late_s += self._debt
        self._debt = 0.0
        self._due = -math.inf

    def stop(self) -> None:
        """Ends the current wait and all later ones."""
        self._over.set()


class EmulatedLink:
    """Delays KV transfers, one after the other, to the speed of the device's link. Used in one event loop."""

    def __init__(self, roofline: Roofline) -> None:
        self._roofline = roofline
        self._free = -math.inf

    async def carry(self, tokens: int, began: float) -> None:
        """`began` is in the time of the event loop."""
        self._free = max(self._free, began) + self._roofline.transfer_seconds(tokens)
        await asyncio.sleep(self._free - asyncio.get_running_loop().time())
