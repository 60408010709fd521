"""An environment of a stated shape: so many turns, so many characters to read at each. For benchmarks and trials."""

from __future__ import annotations

import random

LETTERS = "abcdefghijklmnopqrstuvwxyz "


class Shaped:
    """Anything is a good action. Observations differ from seed to seed and from turn to turn, so nothing is cached
    that a real task would not have cached."""

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
