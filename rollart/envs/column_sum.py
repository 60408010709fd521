"""Sums of two numbers, worked out in written columns: one turn, a long reply, nearly all decode.

For `347+285=` the written answer is `7+5=12;4+8+1=13;3+2+1=6;632`: a step for each column from the right, with the
carry of the step before, and then the sum.
"""

from __future__ import annotations

import hashlib
import random
import re
from typing import Any

RULES = (
    "Add the two numbers column by column from the right, with carries, and then write the sum, as in this example: "
    "for 347+285= write 7+5=12;4+8+1=13;3+2+1=6;632\n"
)
NUMBER = re.compile(r"-?[0-9]+")
DRAWS = 10_000


class ColumnSum:
    """1 if the last number in the answer is the sum."""

    reusable = True
    isolation = "shared"

    def __init__(self, digits: int = 3, rules: bool = False, held_out: bool = False) -> None:
        self.digits, self.rules, self.held_out = digits, rules, held_out
        self.expression = self.answer = ""

    def reset(self, seed: int) -> str:
        rng = random.Random(f"column sum {seed}")
        for _ in range(DRAWS):
            left, right = (rng.randint(10 ** (self.digits - 1), 10**self.digits - 1) for _ in range(2))
            self.expression, self.answer = f"{left}+{right}", str(left + right)
            if belongs_to_held_out(self.expression) == self.held_out:
                break
        else:
            raise ValueError("no sum was drawn; raise `digits` so that there are more of them")
        return (RULES if self.rules else "") + self.expression + "="

    def step(self, action: str) -> dict[str, Any]:
        numbers = NUMBER.findall(action)
        success = bool(numbers) and numbers[-1] == self.answer
        info = {"success": success, "expression": self.expression, "answer": self.answer}
        return {"messages": [], "reward": float(success), "done": True, "info": info}

    def close(self) -> None:
        pass


def belongs_to_held_out(expression: str) -> bool:
    """One sum in five, by its content alone, is never trained."""
    return hashlib.sha256(expression.encode()).digest()[0] % 5 == 0


def player(env: ColumnSum, rng: random.Random, *, skill: float) -> str:
    """Writes the columns. With probability 1 - `skill` a column is added wrongly, and the sum comes out accordingly."""
    left, right = env.expression.split("+")
    carry, steps, result = 0, [], ""
    for one, other in zip(reversed(left), reversed(right), strict=True):
        total = int(one) + int(other) + carry
        if rng.random() >= skill:
            total = max(0, total + rng.choice((-2, -1, 1, 2)))
        steps.append(f"{one}+{other}{'+1' if carry else ''}={total}")
        carry = int(total >= 10)
        result = str(total % 10) + result
    return ";".join([*steps, ("1" if carry else "") + result])
