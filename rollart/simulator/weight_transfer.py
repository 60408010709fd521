"""The simulated transfer of weights from the trainer to the engines, over named links.

`store`: the trainer continues at once; weights are pushed to a store near the engines, which pull each bucket when it
is there and stand still only for the last part. With `install_first`, the trainer waits for that before its next step.
`collective`, or a store without `overlap`: trainer and engines stop until the weights have arrived.
"""

import asyncio
from typing import Literal

from rollart.core.types import LoadResult
from rollart.simulator.constants import Constants
from rollart.simulator.scenario import Scenario

_DEFAULT = Constants()


class WeightTransfer:
    """`push` and `pull` are rates of links in bytes a second; a collective uses only the first. Of a transfer,
    `hidden_s` overlap with other work; then engines stand still for `exposed_s`."""

    def __init__(
        self,
        size: int,
        method: Literal["store", "collective"],
        push: float,
        pull: float,
        overlap: bool = True,
        constants: Constants = _DEFAULT,
        install_first: bool = False,
    ) -> None:
        self.size, self.method, self._install_first = size, method, install_first
        self.free_at = 0.0
        self._pushed_at: dict[int, float] = {}
        if method == "store":
            self.push_s = size / (push * constants.push_efficiency)
            self.pull_s = size / (pull * constants.pull_efficiency)
        else:
            self.push_s, self.pull_s = 0.0, size / (push * constants.collective_efficiency)
        self._stops = method == "collective" or not overlap
        self.exposed_s = self.push_s + self.pull_s if self._stops else constants.pull_exposed * self.pull_s
        self.hidden_s = 0.0 if self._stops else max(self.push_s, self.pull_s - self.exposed_s)

    @classmethod
    def of(cls, scenario: Scenario) -> "WeightTransfer":
        shape, config, links = scenario.shape, scenario.simulate.weights, scenario.links
        size = shape.parameters * shape.number_bytes
        push, pull = links[config.push] * 1e9, links[config.pull] * 1e9
        first = scenario.simulate.bound == "served" and config.install_first
        return cls(size, config.method, push, pull, config.overlap, scenario.simulate.constants, first)

    def publish(self, version: int) -> None:
        """Start the transfer of `version`; the trainer may not begin another step before `free_at`."""
        now = asyncio.get_running_loop().time()
        if self._stops:
            self.free_at = now + self.exposed_s
            return
        before = max(self._pushed_at.values(), default=now)
        self._pushed_at = {version: max(now, before) + self.push_s}
        if self._install_first:
            self.free_at = self._pushed_at[version] + self.exposed_s

    async def fetch(self, version: int) -> LoadResult:
        """Returns when an engine has all that it can load without standing still."""
        if not self._stops:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(max(self._pushed_at.get(version, now) - now, self.pull_s - self.exposed_s))
        return LoadResult(version, self.pull_s, self.exposed_s, self.size, self.method)
