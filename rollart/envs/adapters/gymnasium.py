"""Any environment of gymnasium whose actions are discrete or a box, played in text.

The observation is the environment's own text picture if it has one (the toy-text games), otherwise numbers. An action
is parsed leniently: the last part of the text that names one.
"""

from __future__ import annotations

import contextlib
import random
import re
from typing import Any

import gymnasium
import numpy
from gymnasium import spaces

from rollart.envs.adapters import instance

# By the name of the game: names of its actions, and what its picture or its numbers mean.
KNOWN = {
    "FrozenLake": (("left", "down", "right", "up"), "[ ] is where you are. Go to G on F; H is a hole."),
    "CliffWalking": (("up", "right", "down", "left"), "x is where you are. Go to T on o; C is a cliff."),
    "Taxi": (
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "[ ] is your taxi. Fetch the passenger at ( ), or in the taxi, and bring them to < >. | is a wall.",
    ),
    "Blackjack": (("stick", "hit"), "You see your sum, the dealer's card, and whether you have a usable ace."),
    "CartPole": (("left", "right"), "Keep the pole up. You see position, speed, angle and angular speed."),
    "MountainCar": (("left", "stay", "right"), "Reach the hill on the right. You see position and speed."),
}
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
COLOUR = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", re.DOTALL)  # how pictures show where things are
BRACKETS = {"34;1": ("(", ")"), "35": ("<", ">")}  # in Taxi, the passenger and the destination


class Gymnasium:
    """`options` go to `gymnasium.make`. The reward of an unparsable action is `unreadable`; it changes nothing.

    `picture`: show the text picture; None: if there is one. `actions` are names for discrete actions, `success` is the
    return that counts as one; without it, evaluations count any positive return.
    """

    reusable = True

    def __init__(
        self,
        id: str,
        options: dict[str, Any] | None = None,
        *,
        picture: bool | None = None,
        actions: list[str] | None = None,
        success: float | None = None,
        unreadable: float = 0.0,
        rules: bool = True,
        held_out: bool = False,
    ) -> None:
        options = options or {}
        if picture is None:
            with contextlib.closing(gymnasium.make(id, **options)) as env:
                picture = "ansi" in env.metadata.get("render_modes", ())
        self.env = gymnasium.make(id, **options, **({"render_mode": "ansi"} if picture else {}))
        self.picture, self.success, self.unreadable = picture, success, unreadable
        self.rules, self.held_out = rules, held_out
        space = self.env.action_space
        if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)):
            raise ValueError(f"the actions of {id} are a {type(space).__name__}; a discrete or a box space is needed")
        names, self.about = KNOWN.get(id.split("-")[0], ((), ""))
        self.names = tuple(actions or names)
        if self.names and not (isinstance(space, spaces.Discrete) and len(self.names) == space.n):
            raise ValueError(f"`actions` has {len(self.names)} names, but the actions of {id} are {space}")
        self.seen: Any = None
        self.total = 0.0

    def reset(self, seed: int) -> str:
        seed = instance(seed, self.held_out)
        self.env.action_space.seed(seed)  # for players that sample from it
        self.seen, _ = self.env.reset(seed=seed)
        self.total = 0.0
        rules = " ".join(part for part in (self.about, self.instruction()) if part) + "\n"
        return (rules if self.rules else "") + self._text()

    def step(self, action: str) -> dict[str, Any]:
        move = self.parse(action)
        if move is None:
            self.total += self.unreadable
            return {"messages": self.instruction() + "\n" + self._text(), "reward": self.unreadable, "done": False}
        self.seen, reward, terminated, truncated, _ = self.env.step(move)
        self.total += float(reward)
        over = bool(terminated or truncated)
        info = {} if self.success is None or not over else {"success": self.total >= self.success}
        step = {"messages": self._text(), "reward": float(reward), "info": info}
        return {**step, "done": bool(terminated), "truncated": bool(truncated and not terminated)}

    def close(self) -> None:
        self.env.close()

    def instruction(self) -> str:
        """What an action should look like."""
        space = self.env.action_space
        if self.names:
            return f"Answer with one of: {', '.join(self.names)}."
        if isinstance(space, spaces.Discrete):
            return f"Answer with a whole number from {space.start} to {space.start + space.n - 1}."
        if isinstance(space, spaces.Box):
            kind = "whole number" if numpy.issubdtype(space.dtype, numpy.integer) else "number"
            low, high = _plain(space.low.min()), _plain(space.high.max())
            return f"Answer with {_size(space)} {kind}{'s' * (_size(space) > 1)} from {low} to {high}."
        sizes = [2] * _size(space) if isinstance(space, spaces.MultiBinary) else space.nvec.reshape(-1)
        return f"Answer with {len(sizes)} whole numbers from 0, below {', '.join(map(str, sizes))}."

    def parse(self, action: str) -> Any:
        """The action as the environment takes it, or None."""
        space = self.env.action_space
        if isinstance(space, spaces.Discrete):
            return self._discrete(action, space)
        numbers = [float(number) for number in NUMBER.findall(action)][-_size(space) :]
        whole = isinstance(space, spaces.Box) or all(number.is_integer() for number in numbers)
        if len(numbers) != _size(space) or not whole or any(abs(number) > 1e18 for number in numbers):
            return None
        move = numpy.array(numbers).reshape(space.shape).astype(space.dtype)
        return move if space.contains(move) else None

    def _discrete(self, action: str, space: spaces.Discrete) -> int | None:
        words = re.findall(r"[a-z_]+|\d{1,9}", action.lower())
        for word in reversed(words):
            if word in self.names:
                return int(space.start) + self.names.index(word)
            if word.isdecimal() and space.contains(int(word)):
                return int(word)
        return None

    def _text(self) -> str:
        if self.picture:
            return COLOUR.sub(_bracketed, str(self.env.render())).strip("\n")
        return str(_plain(self.seen))


def _bracketed(found: re.Match[str]) -> str:
    before, after = BRACKETS.get(found[1], ("[", "]"))
    return f"{before}{found[2]}{after}"


def _size(space: Any) -> int:
    return int(numpy.prod(space.shape))


def _plain(value: Any) -> Any:
    """Numbers in a readable form."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return _plain(value)
    return float(f"{value:.4g}") if isinstance(value, float) else value


def player(env: Gymnasium, rng: random.Random) -> str:
    """A random action."""
    env.env.action_space.seed(rng.randrange(2**31))
    action = env.env.action_space.sample()
    return env.names[int(action) - int(env.env.action_space.start)] if env.names else str(_plain(action))
