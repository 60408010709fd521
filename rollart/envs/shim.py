"""The environment's side of a slot: one environment object, made when first needed and kept for the next episode.

Runs in the forking host with the Python of the environment's own family: standard library only.
"""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from typing import Any


class EnvironmentShim:
    def __init__(self) -> None:
        self._key: Any = None
        self._environment: Any = None

    def reset(self, env: str, args: dict[str, Any], held_out: bool, seed: int) -> Any:
        key = (env, args, held_out)
        if self._key != key:
            self.close()
            self._environment = make(env, args, held_out)
            self._key = key
        # Many environments draw from the global generators, whatever seed they are given.
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        return self._environment.reset(seed)

    def step(self, action: str) -> Any:
        return self._environment.step(action)

    def close(self) -> None:
        environment, self._environment, self._key = self._environment, None, None
        if environment is not None and hasattr(environment, "close"):
            environment.close()


def make(env: str, args: dict[str, Any], held_out: bool) -> Any:
    module, _, name = env.partition(":")
    maker = getattr(importlib.import_module(module), name)
    if held_out and "held_out" in inspect.signature(maker).parameters:
        args = {**args, "held_out": True}
    return maker(**args)
