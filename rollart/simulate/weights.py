"""The modelled way of weights from the trainer to the engines, over named links.

By a `store`: the trainer goes on at once, the weights are pushed to a store near the engines, who pull them as they
come and stand still only for the last part. By a `collective`: trainer and engines stop and exchange them.
"""

import asyncio
from typing import Literal

from rollart.simulate.constants import COLLECTIVE_EFFICIENCY, PULL_EXPOSED, STORE_PULL_EFFICIENCY, STORE_PUSH_EFFICIENCY
from rollart.types import Loaded


class Weights:
    """`push` and `pull` are rates of links in bytes a second; a collective uses only the first."""

    def __init__(self, size: int, way: Literal["store", "collective"], push: float, pull: float) -> None:
        self.size, self.way = size, way
        self.free_at = 0.0
        self._pushed_at: dict[int, float] = {}
        if way == "store":
            self.push_s = size / (push * STORE_PUSH_EFFICIENCY)
            self.pull_s = size / (pull * STORE_PULL_EFFICIENCY)
            self.exposed_s = PULL_EXPOSED * self.pull_s
        else:
            self.push_s, self.pull_s = 0.0, size / (push * COLLECTIVE_EFFICIENCY)
            self.exposed_s = self.pull_s

    def publish(self, version: int) -> None:
        """Version `version` is there; the trainer may not begin another step before `free_at`."""
        now = asyncio.get_running_loop().time()
        before = max(self._pushed_at.values(), default=now)
        self._pushed_at = {version: max(now, before) + self.push_s}
        if self.way == "collective":
            self.free_at = now + self.pull_s

    async def fetched(self, version: int) -> Loaded:
        """Until an engine has all that it can have without standing still."""
        now = asyncio.get_running_loop().time()
        pushed = self._pushed_at.get(version, now)
        await asyncio.sleep(max(0.0, pushed - now) + self.pull_s - self.exposed_s)
        return Loaded(version, self.pull_s, self.exposed_s, self.size, self.way)
