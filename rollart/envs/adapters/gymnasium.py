"""Any environment of gymnasium whose actions are discrete or a box, played in text.

What is seen is the environment's own text picture if it has one (the toy-text games), otherwise its observation as
numbers. An action is read leniently: the last thing in the answer that names one.
"""

from __future__ import annotations

import re
from typing import Any

import gymnasium
from gymnasium import spaces

from rollart.envs.adapters import instance

NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "stay", "right"),
    "Acrobot": ("clockwise", "none", "counterclockwise"),
}
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
HIGHLIGHT = re.compile(r"\x1b\[\d+m(.*?)\x1b\[0m", re.DOTALL)  # how pictures show where one is


class Gymnasium:
    """`options` go to `gymnasium.make`. An action that cannot be read earns `unreadable` and changes nothing.

    `picture`: show the text picture; None: if there is one. `actions` are names for discrete actions, `success` is the
    return that counts as one; without it, evaluations count any positive return.
    """

    def __init__(
        self,
        id: str,
        options: dict[str, Any] | None = None,
        picture: bool | None = None,
        actions: list[str] | None = None,
        success: float | None = None,
        unreadable: float = 0.0,
        rules: bool = True,
        held_out: bool = False,
    ) -> None:
        options = dict(options or {})
        if picture is None:
            picture = "ansi" in gymnasium.spec(id).make().metadata.get("render_modes", ())
        if picture:
            options["render_mode"] = "ansi"
        self.env = gymnasium.make(id, **options)
        self.picture, self.success, self.unreadable = picture, success, unreadable
        self.rules, self.held_out = rules, held_out
        space = self.env.action_space
        if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)):
            raise ValueError(f"the actions of {id} are a {type(space).__name__}; a discrete or a box space is needed")
        self.names = tuple(actions or NAMES.get(id.split("/")[-1].split("-")[0], ()))
        if self.names and not (isinstance(space, spaces.Discrete) and len(self.names) == space.n):
            raise ValueError(f"`actions` has {len(self.names)} names, but the actions of {id} are {space}")
        self.seen: Any = None
        self.total = 0.0

    def reset(self, seed: int) -> str:
        seed = instance(seed, self.held_out)
        self.env.action_space.seed(seed)  # for those who sample from it
        self.seen, _ = self.env.reset(seed=seed)
        self.total = 0.0
        return (self.wanted() + "\n" if self.rules else "") + self._text()

    def step(self, action: str) -> dict[str, Any]:
        move = self.parse(action)
        if move is None:
            self.total += self.unreadable
            return {"messages": self.wanted() + "\n" + self._text(), "reward": self.unreadable, "done": False}
        self.seen, reward, terminated, truncated, _ = self.env.step(move)
        self.total += float(reward)
        over = bool(terminated or truncated)
        info = {} if self.success is None or not over else {"success": self.total >= self.success}
        step = {"messages": self._text(), "reward": float(reward), "info": info}
        return {**step, "done": bool(terminated), "truncated": bool(truncated and not terminated)}

    def close(self) -> None:
        self.env.close()

    def wanted(self) -> str:
        """What an answer should be."""
        space = self.env.action_space
        if self.names:
            return f"Answer with one of: {', '.join(self.names)}."
        if isinstance(space, spaces.Discrete):
            return f"Answer with a whole number from {space.start} to {space.start + space.n - 1}."
        size = int(space.low.size) if isinstance(space, spaces.Box) else len(_sizes(space))
        if isinstance(space, spaces.Box):
            low, high = _plain(space.low.min()), _plain(space.high.max())
            return f"Answer with {size} {'number' if size == 1 else 'numbers'} from {low} to {high}."
        return f"Answer with {size} whole numbers, each from 0 to below {', '.join(map(str, _sizes(space)))}."

    def parse(self, action: str) -> Any:
        """The action in the way that the environment takes it, or None."""
        space = self.env.action_space
        if isinstance(space, spaces.Discrete):
            return self._discrete(action, space)
        size = int(space.low.size) if isinstance(space, spaces.Box) else len(_sizes(space))
        numbers = [float(number) for number in NUMBER.findall(action)][-size:]
        if len(numbers) != size:
            return None
        if not isinstance(space, spaces.Box) and not all(number.is_integer() for number in numbers):
            return None
        shaped = space.sample()
        shaped.reshape(-1)[:] = [0] * size
        if not all(abs(number) < 1e18 for number in numbers):
            return None
        shaped.reshape(-1)[:] = numbers
        return shaped if space.contains(shaped) else None

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
            return HIGHLIGHT.sub(r"[\1]", str(self.env.render())).strip("\n")
        return str(_plain(self.seen))


def _sizes(space: Any) -> list[int]:
    return [2] * int(space.n) if isinstance(space, spaces.MultiBinary) else [int(size) for size in space.nvec]


def _plain(value: Any) -> Any:
    """Numbers as a reader wants them."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return _plain(value)
    return float(f"{value:.4g}") if isinstance(value, float) else value


def player(env: Gymnasium, rng: Any, *, skill: float = 0.0) -> str:
    """Any action at all, whatever the skill asked for: a baseline for environments that nobody has scripted."""
    env.env.action_space.seed(rng.randrange(2**31))
    action = env.env.action_space.sample()
    if env.names:
        return env.names[int(action) - int(env.env.action_space.start)]
    return str(_plain(action))
