"""Engines and trainer that share the cores of one machine: while both work, either takes longer by the same factor.

One number stands for all that they fight for: cores, caches and memory bandwidth. Environments and the control plane
are not in it; what they cost is in the measured times of steps and generations.
"""

import asyncio
from collections.abc import Collection

from rollart.simulate.engine import FluidEngine

_LEFT_S = 1e-4


class Contention:
    """`extra` is by how much: 0.3 is 1.3 times as long."""

    def __init__(self, extra: float, engines: Collection[FluidEngine]) -> None:
        self._extra, self._engines = extra, engines

    async def train(self, seconds: float) -> None:
        """Work that would take `seconds` alone; what engines did beside it has to be caught up with."""
        if not self._extra:
            return await asyncio.sleep(seconds)
        lost = self._extra / (1.0 + self._extra)
        self._slow(1.0 + self._extra)
        try:
            while seconds > _LEFT_S:
                before = self._worked()
                await asyncio.sleep(seconds)
                seconds = lost * (self._worked() - before)
        finally:
            self._slow(1.0)

    def _slow(self, factor: float) -> None:
        for engine in self._engines:
            engine.slow(factor)

    def _worked(self) -> float:
        return max((engine.worked() for engine in self._engines), default=0.0)
