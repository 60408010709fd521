"""Sums from reasoning-gym's `chain_sum`, to be solved in written steps: one turn, a long answer, nearly all decode."""

from __future__ import annotations

import hashlib
import random
import re
from typing import Any

from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

RULES = (
    "Work out the sum below from left to right, one step at a time, and write each step as in this example: "
    "for 25+47-13= write 25+47=72;72-13=59\n"
)
NUMBER = re.compile(r"-?[0-9]+")
DRAWS = 10_000


class ChainSum:
    """The reward is reasoning-gym's score of the last number in the answer."""

    def __init__(
        self,
        min_terms: int = 3,
        max_terms: int = 4,
        min_digits: int = 2,
        max_digits: int = 2,
        rules: bool = False,
        held_out: bool = False,
    ) -> None:
        self._sums = ChainSumDataset(ChainSumConfig(min_terms, max_terms, min_digits, max_digits, seed=0, size=1))
        self.rules, self.held_out = rules, held_out
        self.item: dict[str, Any] = {}
        self.expression = ""

    def reset(self, seed: int) -> str:
        rng = random.Random(f"chain_sum {seed}")  # a stream that nobody else has
        for _ in range(DRAWS):
            self.item = self._sums[rng.randrange(2**48)]  # its items are made from their index
            self.expression = self.item["metadata"]["expression"].replace(" ", "")
            if belongs_to_held_out(self.expression) == self.held_out:
                break
        else:
            raise ValueError("no sum was drawn; raise `max_terms` or `max_digits` so that there are more of them")
        return (RULES if self.rules else "") + self.expression + "="

    def step(self, action: str) -> dict[str, Any]:
        numbers = NUMBER.findall(action)
        score = float(self._sums.score_answer(numbers[-1] if numbers else None, self.item))
        info = {"success": score == 1.0, "expression": self.expression, "answer": self.item["answer"]}
        return {"messages": [], "reward": score, "done": True, "info": info}

    def close(self) -> None:
        pass


def belongs_to_held_out(expression: str) -> bool:
    """One sum in five, by its content alone, is never trained."""
    return hashlib.sha256(expression.encode()).digest()[0] % 5 == 0


def player(env: ChainSum, rng: random.Random, *, skill: float) -> str:
    """Writes the sum step by step. With probability 1 - `skill`, a step has one wrong digit or a wrong carry."""
    total, *terms = re.findall(r"[+-]?\d+", env.expression)
    steps = []
    for term in terms:
        result = int(total) + int(term)
        if rng.random() >= skill:
            result += rng.choice((-1, 1)) * rng.choice((1, 1, 2, 10, 10, 20))
        steps.append(f"{total}{term}={result}")
        total = str(result)
    return ";".join(steps)
