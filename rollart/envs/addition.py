"""Sums of two numbers, in one turn, for a pretrained model: an example comes first, as turns of the conversation."""

from __future__ import annotations

import hashlib
import random
import re
from typing import Any

EXAMPLE = (12, 25)
NUMBER = re.compile(r"\d+")
DRAWS = 10_000


class Addition:
    """1 if the last number of the reply is the sum."""

    reusable = True
    isolation = "shared"

    def __init__(self, low: int = 1, high: int = 30, held_out: bool = False) -> None:
        if not 0 <= low < high:
            raise ValueError("Addition needs 0 <= low < high")
        self.low, self.high, self.held_out = low, high, held_out
        self.terms = EXAMPLE

    def reset(self, seed: int) -> list[dict[str, str]]:
        rng = random.Random(seed)
        for _ in range(DRAWS):
            self.terms = (rng.randint(self.low, self.high), rng.randint(self.low, self.high))
            if self.terms != EXAMPLE and belongs_to_held_out(*self.terms) == self.held_out:
                break
        else:
            raise ValueError("no sum was drawn; widen `low` to `high` so that there are more of them")
        contents = ("Add.", question(*EXAMPLE), solution(*EXAMPLE), question(*self.terms))
        roles = ("system", "user", "assistant", "user")
        return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]

    def step(self, action: str) -> dict[str, Any]:
        numbers = NUMBER.findall(action)
        success = bool(numbers) and numbers[-1] == str(sum(self.terms))
        return {"messages": [], "reward": float(success), "done": True, "info": {"success": success}}

    def close(self) -> None:
        pass


def question(first: int, second: int) -> str:
    return f"{first} + {second} ="


def solution(first: int, second: int) -> str:
    return f"{first} + {second} = {first + second}"


def belongs_to_held_out(first: int, second: int) -> bool:
    """One sum in five, in both orders, is never trained."""
    low, high = sorted((first, second))
    return hashlib.sha256(f"{low} {high}".encode()).digest()[0] % 5 == 0


def player(env: Addition, rng: random.Random, *, skill: float) -> str:
    """The solution; with probability 1 - `skill` it is off by one or by ten."""
    first, second = env.terms
    if rng.random() < skill:
        return solution(first, second)
    return f"{first} + {second} = {abs(first + second + rng.choice((-10, -1, 1, 10)))}"
