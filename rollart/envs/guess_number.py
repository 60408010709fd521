"""Guess the number: an interval is shown, the reply to each guess is `higher` or `lower`, and guesses are few."""

from __future__ import annotations

import random
import re
from typing import Any

RULES = (
    "I think of a whole number from {low} to {high}. You have {guesses} guesses. After each I say `higher` or `lower`. "
    "Answer with the number alone.\n"
)
DRAWS = 10_000


class GuessNumber:
    """1 when found; otherwise at the end `partial` times the closeness of the last guess, within the interval."""

    reusable = True
    isolation = "shared"

    def __init__(
        self,
        *,
        top: int = 99,
        min_width: int = 11,
        max_width: int = 15,
        guesses: int = 4,
        partial: float = 0.5,
        rules: bool = False,
        held_out: bool = False,
    ) -> None:
        if not 1 <= min_width <= max_width <= top + 1:
            raise ValueError("GuessNumber needs 1 <= min_width <= max_width <= top + 1")
        self.top, self.min_width, self.max_width = top, min_width, max_width
        self.guesses, self.partial, self.rules, self.held_out = guesses, partial, rules, held_out
        self.low = self.high = self.secret = 0
        self.possible = (0, 0)  # what the replies so far leave open
        self.left = 0

    def reset(self, seed: int) -> str:
        rng = random.Random(f"guess_number {seed}")  # a stream of its own
        for _ in range(DRAWS):
            width = rng.randint(self.min_width, self.max_width)
            self.low = rng.randint(0, self.top + 1 - width)
            self.high = self.low + width - 1
            self.secret = rng.randint(self.low, self.high)
            if belongs_to_held_out(self.low, self.high) == self.held_out:
                break
        else:
            raise ValueError("no instance was drawn; raise `top` or `max_width` so that there are more of them")
        self.possible = (self.low, self.high)
        self.left = self.guesses
        rules = RULES.format(low=self.low, high=self.high, guesses=self.guesses) if self.rules else ""
        return rules + f"{self.low} {self.high}"

    def step(self, action: str) -> dict[str, Any]:
        self.left -= 1
        guess = parse(action)
        found = guess == self.secret
        over = found or self.left == 0
        low, high = self.possible
        if guess is not None and guess < self.secret:
            self.possible = (max(low, guess + 1), high)
        elif guess is not None and not found:
            self.possible = (low, min(high, guess - 1))
        reward = (1.0 if found else self.partial * self._closeness(guess)) if over else 0.0
        info = {"success": found} if over else {}
        return {"messages": self._reply(guess), "reward": reward, "done": over, "info": info}

    def close(self) -> None:
        pass

    def _reply(self, guess: int | None) -> str:
        if guess is None:
            return "number?"
        return "yes" if guess == self.secret else "higher" if guess < self.secret else "lower"

    def _closeness(self, guess: int | None) -> float:
        """From 1 at the secret to 0 at the interval's width away."""
        return 0.0 if guess is None else max(0.0, 1 - abs(guess - self.secret) / (self.high - self.low + 1))


def belongs_to_held_out(low: int, high: int) -> bool:
    """One interval in seven is never trained, whatever its secret: split by the secret too, training would teach that
    some numbers of an interval are never right, which is wrong exactly in the test. They are spread evenly: a policy
    that bisects, rather than memorizes a table of intervals, solves these too."""
    return (low + 3 * high) % 7 == 0


def parse(action: str) -> int | None:
    """The first whole number of a sensible length."""
    found = re.search(r"-?\d{1,9}", action)
    return int(found.group()) if found else None


def player(env: GuessNumber, rng: random.Random, *, skill: float) -> str:
    """With probability `skill` the middle of what is still possible, otherwise a random number of the interval."""
    if rng.random() < skill:
        return str(sum(env.possible) // 2)
    return str(rng.randint(env.low, env.high))
