"""Where does a person live? A small tool-use task for a pretrained model: look the person up, then answer.

The agent writes `lookup NAME` or `answer CITY`. Two examples come first, as turns of the conversation.
"""

from __future__ import annotations

import hashlib
import random
import re
from typing import Any

NAMES = (
    *("Anna", "Ben", "Carl", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Jack", "James", "Jane"),
    *("John", "Kate", "Laura", "Lucy", "Mark", "Mary", "Nick", "Paul", "Peter", "Rose", "Simon", "Steve"),
)
CITIES = (
    *("Athens", "Berlin", "Boston", "Cairo", "Chicago", "Dallas", "Dublin", "Geneva", "London", "Madrid", "Miami"),
    *("Milan", "Moscow", "Oslo", "Paris", "Prague", "Rome", "Seattle", "Sydney", "Tokyo", "Toronto", "Vienna"),
)
RULES = "Reply with `lookup NAME` or `answer CITY`."
COMMAND = re.compile(r"\s*(lookup|answer)\s+(\w+)\W*", re.IGNORECASE)
DRAWS = 10_000


class Directory:
    """1 for the right city. A wrong city ends the episode too; a wrong look-up only costs a turn."""

    reusable = True

    def __init__(self, turns: int = 2, held_out: bool = False) -> None:
        if turns < 2:
            raise ValueError("Directory needs turns >= 2: one to look up and one to answer")
        self.turns, self.held_out = turns, held_out
        self.city: dict[str, str] = {}
        self.person = ""
        self.looked_up = False
        self.left = 0

    def reset(self, seed: int) -> list[dict[str, str]]:
        rng = random.Random(seed)
        for _ in range(DRAWS):
            self.city = dict(zip(NAMES, rng.choices(CITIES, k=len(NAMES)), strict=True))
            self.person = rng.choice(NAMES)
            if belongs_to_held_out(self.person, self.city[self.person]) == self.held_out:
                break
        else:
            raise ValueError("no instance was drawn")
        self.looked_up, self.left = False, self.turns
        examples = [*_example("Tom", "Lima"), *_example("Sara", "Delhi")]
        return [_message("system", RULES), *examples, _message("user", question(self.person))]

    def step(self, action: str) -> dict[str, Any]:
        self.left -= 1
        command = COMMAND.fullmatch(action)
        verb, word = (command[1].lower(), command[2].capitalize()) if command else ("", "")
        if verb == "answer":
            return self._over(word == self.city[self.person])
        self.looked_up |= word == self.person
        if not self.left:
            return self._over(False)
        reply = RULES if not verb else entry(word, self.city[word]) if word in self.city else f"{word} is not listed."
        return {"messages": reply, "reward": 0.0, "done": False}

    def close(self) -> None:
        pass

    def _over(self, success: bool) -> dict[str, Any]:
        return {"messages": [], "reward": float(success), "done": True, "info": {"success": success}}


def question(name: str) -> str:
    return f"Where does {name} live?"


def entry(name: str, city: str) -> str:
    return f"{name} lives in {city}."


def belongs_to_held_out(name: str, city: str) -> bool:
    """One pair in five is never trained."""
    return hashlib.sha256(f"{name} {city}".encode()).digest()[0] % 5 == 0


def player(env: Directory, rng: random.Random, *, skill: float) -> str:
    """With probability `skill` the right command, otherwise any answer."""
    if rng.random() >= skill:
        return f"answer {rng.choice(CITIES)}"
    return f"answer {env.city[env.person]}" if env.looked_up else f"lookup {env.person}"


def _example(name: str, city: str) -> list[dict[str, str]]:
    turns = [question(name), f"lookup {name}", entry(name, city), f"answer {city}"]
    return [_message(role, text) for role, text in zip(("user", "assistant") * 2, turns, strict=True)]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
