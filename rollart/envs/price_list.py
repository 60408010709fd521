"""Questions that only a tool can answer: what something costs today. Two turns: call the tool, then say the number."""

from __future__ import annotations

import random
import re
from typing import Any

from rollart.envs.tools import call_text

ITEMS = ("fig", "kiwi", "lime", "nut", "pear", "plum")
NUMBER = re.compile(r"\d+")


class PriceList:
    """1 if the last number of the answer is the price. Prices are drawn for each episode, so they cannot be learnt."""

    reusable = True
    isolation = "shared"

    def __init__(self, highest: int = 99) -> None:
        self.highest = highest
        self.tools = [self.price]
        self.prices: dict[str, int] = {}
        self.item = ""
        self.found: int | None = None  # the price that was looked up last

    def price(self, item: str) -> str:
        """The price of an item today.

        Args:
            item: its name
        """
        if item not in self.prices:
            raise ValueError(f"there is no {item}")
        self.found = self.prices[item]
        return str(self.found)

    def reset(self, seed: int) -> str:
        rng = random.Random(seed)
        self.prices = {item: rng.randint(1, self.highest) for item in ITEMS}
        self.item, self.found = rng.choice(ITEMS), None
        return f"What is the price of a {self.item}?"

    def step(self, action: str) -> dict[str, Any]:
        numbers = NUMBER.findall(action)
        success = bool(numbers) and numbers[-1] == str(self.prices[self.item])
        return {"messages": [], "reward": float(success), "done": True, "info": {"success": success}}

    def close(self) -> None:
        pass


def player(env: PriceList, rng: random.Random, *, skill: float = 1.0) -> str:
    """Looks up a price and says it; with probability 1 - `skill` that of any item."""
    if env.found is not None:
        return str(env.found)
    return call_text("price", {"item": env.item if rng.random() < skill else rng.choice(ITEMS)})
