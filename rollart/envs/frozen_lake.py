"""FrozenLake by gymnasium's rules, as ROLL plays it: random solvable 4x4 maps, random start and goal, no slipping.

The whole map is shown at every turn and an action is one letter, so the work is nearly all prefill.
"""

from __future__ import annotations

import hashlib
import random
import re
from typing import Any

ACTIONS = "LDRU"  # in the order of gymnasium's numbers
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
NAMES = re.compile(r"\b(?:(?i:left|down|right|up)|[LDRU])\b|^\s*[ldru]\s*$")
DRAWS = 10_000
RULES = (
    "You are P on a frozen lake. Reach the goal G. `_` is safe ice, `O` is a hole: if you step into one, you lose. "
    "You have {actions} moves. Answer with one letter: L (left), D (down), R (right) or U (up).\n"
)


class FrozenLake:
    """+1 at the goal, -0.01 for an unreadable action, at most `max_actions` actions."""

    reusable = True
    isolation = "shared"

    def __init__(
        self, size: int = 4, frozen: float = 0.8, max_actions: int = 10, rules: bool = False, held_out: bool = False
    ) -> None:
        self.size, self.frozen, self.max_actions, self.rules, self.held_out = size, frozen, max_actions, rules, held_out
        self.rows: list[str] = []
        self.position = 0
        self.actions = 0

    def reset(self, seed: int) -> str:
        rng = random.Random(f"frozen_lake {seed}")  # a stream of its own
        for _ in range(DRAWS):
            self.rows = self._draw(rng)
            if belongs_to_held_out(self.rows) == self.held_out and 0 < self._distance() <= self.max_actions:
                break
        else:
            raise ValueError("no solvable map was drawn; raise `frozen`, `size` or `max_actions`")
        self.position = "".join(self.rows).index("S")
        self.actions = 0
        return (RULES.format(actions=self.max_actions) if self.rules else "") + self._text()

    def step(self, action: str) -> dict[str, Any]:
        self.actions += 1
        reward, over = -0.01, False
        move = parse(action)
        if move is not None:
            self.position = self.neighbours(self.position)[move]
            tile = "".join(self.rows)[self.position]
            reward, over = float(tile == "G"), tile in "GH"
        truncated = not over and self.actions >= self.max_actions
        info = {"success": reward == 1.0} if over or truncated else {}
        return {"messages": self._text(), "reward": reward, "done": over, "truncated": truncated, "info": info}

    def close(self) -> None:
        pass

    def distances(self) -> list[int | None]:
        """Moves from each tile to the goal; None where it cannot be reached, and in the holes."""
        tiles = "".join(self.rows)
        found: list[int | None] = [None] * len(tiles)
        goal = tiles.index("G")
        found[goal], frontier = 0, [goal]
        for tile in frontier:
            for there in self.neighbours(tile):
                if found[there] is None and tiles[there] != "H":
                    found[there] = (found[tile] or 0) + 1
                    frontier.append(there)
        return found

    def neighbours(self, tile: int) -> list[int]:
        """Where each action leads from a tile, in the order of ACTIONS."""
        row, column = divmod(tile, self.size)
        last = self.size - 1
        return [min(max(row + y, 0), last) * self.size + min(max(column + x, 0), last) for y, x in MOVES]

    def _draw(self, rng: random.Random) -> list[str]:
        tiles = ["F" if rng.random() < self.frozen else "H" for _ in range(self.size**2)]
        start, goal = rng.sample(range(len(tiles)), 2)
        tiles[start], tiles[goal] = "S", "G"
        return ["".join(tiles[at : at + self.size]) for at in range(0, len(tiles), self.size)]

    def _distance(self) -> int:
        return self.distances()["".join(self.rows).index("S")] or 0

    def _text(self) -> str:
        tiles = list("".join(self.rows).translate(str.maketrans("SFH", "__O")))
        tiles[self.position] = "P"
        return "".join("".join(tiles[at : at + self.size]) + "\n" for at in range(0, len(tiles), self.size))


def belongs_to_held_out(rows: list[str]) -> bool:
    """One map in five, by its content alone, is never trained."""
    return hashlib.sha256("".join(rows).encode()).digest()[0] % 5 == 0


def parse(action: str) -> int | None:
    """The first letter or word that names a move."""
    found = NAMES.search(action)
    return ACTIONS.index(found.group().strip()[0].upper()) if found else None


def player(env: FrozenLake, rng: random.Random, *, skill: float) -> str:
    """With probability `skill` a move on a shortest path, otherwise any move."""
    move = rng.randrange(len(ACTIONS))
    if rng.random() < skill:
        distances = env.distances()
        here = distances[env.position]
        move = next(at for at, there in enumerate(env.neighbours(env.position)) if distances[there] == (here or 0) - 1)
    return ACTIONS[move]
