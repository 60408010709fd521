"""An environment with a given number of turns and characters per observation. For benchmarks and trials."""

from __future__ import annotations

import random

LETTERS = "abcdefghijklmnopqrstuvwxyz "


class Shaped:
    """Any action is right. Observations differ between seeds and turns, so prefix caches help no more than in a real
    task."""

    reusable = True

    def __init__(self, turns: int = 8, characters: int = 100, held_out: bool = False) -> None:
        self.turns, self.characters, self.held_out = turns, characters, held_out
        self._rng = random.Random()
        self._left = 0

    def reset(self, seed: int) -> str:
        self._rng = random.Random(f"shaped {seed} {self.held_out}")
        self._left = self.turns
        return self._observation()

    def step(self, action: str) -> tuple[str, float, bool]:
        self._left -= 1
        return self._observation(), 1.0 if action else 0.0, self._left <= 0

    def close(self) -> None:
        pass

    def _observation(self) -> str:
        return "".join(self._rng.choices(LETTERS, k=self.characters))
