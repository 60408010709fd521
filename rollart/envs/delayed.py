"""Any environment, made as slow as one in a container: delays drawn from distributions measured in production.

The quantiles, in seconds, are of software-engineering environments as the RollArt paper plots them: a reset pulls an
image and starts a container, and one in fifty falls into a second mode of six to eight minutes; a step runs a command.
"""

from __future__ import annotations

import importlib
import itertools
import random
import time
from typing import Any

RESET = ((0.0, 13.0), (0.05, 14.2), (0.25, 15.1), (0.5, 22.2), (0.75, 25.6), (0.9, 35.2), (0.95, 40.6), (0.979, 51.0),
         (0.9791, 378.0), (0.99, 393.0), (1.0, 488.0))  # fmt: skip
STEP = ((0.0, 0.5), (0.05, 1.0), (0.25, 2.5), (0.5, 3.8), (0.75, 5.7), (0.9, 8.4), (0.95, 10.9), (0.98, 15.3),
        (0.99, 19.7), (1.0, 51.0))  # fmt: skip


def draw(quantiles: tuple[tuple[float, float], ...], rng: random.Random) -> float:
    """Inverse of the distribution function, straight between the given points."""
    at = rng.random()
    for (before, low), (after, high) in itertools.pairwise(quantiles):
        if at <= after:
            return low + (high - low) * (at - before) / (after - before)
    return quantiles[-1][1]


class Delayed:
    """`env` with every reset and step delayed by `scale` times a draw. Held-out episodes are not delayed."""

    def __init__(
        self, env: str, args: dict[str, Any] | None = None, scale: float = 0.01, held_out: bool = False
    ) -> None:
        module, _, name = env.partition(":")
        self._env = getattr(importlib.import_module(module), name)(**(args or {}), held_out=held_out)
        self._scale = 0.0 if held_out else scale
        # Members of a group share their seed, but not their luck.
        self._luck = random.SystemRandom()

    @property
    def reusable(self) -> bool:
        return bool(getattr(self._env, "reusable", False))

    def reset(self, seed: int) -> Any:
        time.sleep(self._scale * draw(RESET, self._luck))
        return self._env.reset(seed)

    def step(self, action: str) -> Any:
        time.sleep(self._scale * draw(STEP, self._luck))
        return self._env.step(action)

    def close(self) -> None:
        self._env.close()
