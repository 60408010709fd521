"""Contention of engines and trainer that share the cores of one machine.

One number stands for cores, caches and memory bandwidth: it is how much longer everything takes while two or more
processes work. Where more of them work than there are cores, they also share those. Without a number of cores, engines
only contend with training. Environments and the control plane are not in it: what they cost is in the measured times of
steps and generations.
"""

import asyncio
from collections.abc import Collection

from rollart.simulator.engine import SimulatedEngine

_DONE_S = 1e-4


def slowdown(working: int, extra: float, cores: int = 0) -> float:
    """How many times as long work takes while that many processes work."""
    if working < 2:
        return 1.0
    shared = max(0, working - max(2, cores)) / cores if cores else 0.0
    return 1.0 + extra + shared


class Contention:
    """Sets the pace of the engines, and of training, whenever one of them begins or ends to work."""

    def __init__(self, extra: float, engines: Collection[SimulatedEngine], cores: int = 0) -> None:
        self._extra, self._cores, self._engines = extra, cores, engines
        self._training = False
        self._factor, self._at, self._lost = 1.0, 0.0, 0.0
        if extra or cores:
            for engine in engines:
                engine.on_change = self._update

    async def train(self, seconds: float) -> None:
        """Work that takes `seconds` alone; what it lost to engines is made up for at the end."""
        if not self._extra and not self._cores:
            return await asyncio.sleep(seconds)
        self._training = True
        self._update()
        try:
            while seconds > _DONE_S:
                self._lost = 0.0
                await asyncio.sleep(seconds)
                self._update()
                seconds = self._lost
        finally:
            self._training = False
            self._update()

    def _update(self) -> None:
        now = asyncio.get_running_loop().time()
        self._lost += (now - self._at) * (1.0 - 1.0 / self._factor)
        self._at = now
        busy = sum(not engine.idle for engine in self._engines)
        working = (busy if self._cores else min(1, busy)) + self._training
        factor = slowdown(working, self._extra, self._cores)
        if factor != self._factor:
            self._factor = factor
            for engine in self._engines:
                engine.set_slowdown(factor)
