"""The environment's side of a worker process: one environment object, made when first needed, or before.

Runs in the forking host with the Python of the environment's own family: standard library only.
"""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from typing import Any

from rollart.envs.tools import Toolbox, calls_in


class EnvironmentProcess:
    def __init__(self) -> None:
        self._key: Any = None
        self._environment: Any = None
        self._toolbox: Toolbox | None = None

    def find(self, env: str) -> None:
        """Raises what its import raises."""
        load(env)

    def isolation(self, env: str) -> str:
        """`shared` if many episodes may run in one process."""
        return str(getattr(load(env), "isolation", "process"))

    def prepare(self, env: str, args: dict[str, Any], held_out: bool) -> None:
        key = (env, args, held_out)
        if self._key != key:
            self.close()
            self._environment = make(env, args, held_out)
            self._key = key

    def reusable(self) -> bool:
        """May this object play another episode after this one?"""
        return bool(getattr(self._environment, "reusable", False))

    def reset(self, env: str, args: dict[str, Any], held_out: bool, seed: int) -> Any:
        self.prepare(env, args, held_out)
        # Many environments draw from the global generators, whatever their seed.
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        observation = self._environment.reset(seed)
        tools = getattr(self._environment, "tools", None)
        self._toolbox = Toolbox(self._environment, tools) if isinstance(tools, (list, tuple)) and tools else None
        return observation if self._toolbox is None else self._toolbox.opening(observation)

    def step(self, action: str) -> Any:
        if self._toolbox is not None:
            _, calls = calls_in(action)
            if calls:
                return self._toolbox.run(calls)
        return self._environment.step(action)

    def act(self, player: str, args: dict[str, Any], seed: int) -> str:
        """What the scripted player would do now; `seed` is for its own draws."""
        return str(load(player)(self._environment, random.Random(seed), **args))

    def demonstrate(
        self, *, env: str, args: dict[str, Any], player: str, player_args: dict[str, Any], seed: int, turns: int
    ) -> tuple[Any, list[tuple[str, Any]]]:
        """A training episode by the scripted player: the reply of `reset`, then each action and the reply of `step`."""
        first = self.reset(env, args, False, seed)
        act, rng = load(player), random.Random(seed)
        played: list[tuple[str, Any]] = []
        while len(played) < turns and not (played and is_last(played[-1][1])):
            action = str(act(self._environment, rng, **player_args))
            played.append((action, self.step(action)))
        if not self.reusable():
            self.close()
        return first, played

    def close(self) -> None:
        environment, self._environment, self._key, self._toolbox = self._environment, None, None, None
        if environment is not None and hasattr(environment, "close"):
            environment.close()


def make(env: str, args: dict[str, Any], held_out: bool) -> Any:
    maker = load(env)
    if held_out and "held_out" in inspect.signature(maker).parameters:
        args = {**args, "held_out": True}
    return maker(**args)


def is_last(reply: Any) -> bool:
    """Whether a step was the last; anything that is not a step counts as the last."""
    if isinstance(reply, dict):
        return bool(reply.get("done") or reply.get("truncated"))
    return not isinstance(reply, (tuple, list)) or len(reply) != 3 or bool(reply[2])


def load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
