"""Any environment, made to fail: delayed, hanging, crashing, answering nonsense or hostile texts, at given rates.

For tests and benchmarks. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

from rollart.envs.delayed import RESET, STEP, draw
from rollart.envs.hostile import answer as wrong_answer
from rollart.envs.hostile import text as hostile_text
from rollart.envs.slot_entry import make

FAULTS = ("hang", "crash", "wrong", "hostile")
CRASHES = ("exit", "segfault", "kill", "raise", "interrupt")


class Chaos:
    """`env` (`module:Class` with `args`), and at each reset and step a chance of each fault.

    `hang` never answers, `crash` ends the process in one of several ways or raises, `wrong` answers what is no answer,
    `hostile` says something rightful but nasty. `delay` is the share of the delays measured in production, whose reset
    has a second mode; `slow_reset` seconds come on top of one reset in 1 / `slow`. With a `seed` an episode's faults
    follow from it and the episode's own; without one every process has its own luck. Held-out episodes are left alone.
    """

    def __init__(
        self,
        env: str,
        args: dict[str, Any] | None = None,
        hang: float = 0.0,
        crash: float = 0.0,
        wrong: float = 0.0,
        hostile: float = 0.0,
        delay: float = 0.0,
        slow: float = 0.0,
        slow_reset: float = 10.0,
        seed: int | None = None,
        held_out: bool = False,
    ) -> None:
        self._rates = dict(zip(FAULTS, (hang, crash, wrong, hostile)))  # noqa: B905 (Python 3.9 has no strict)
        if min(self._rates.values()) < 0 or sum(self._rates.values()) > 1:
            raise ValueError("Chaos needs rates that are not negative and together at most 1")
        self._calm = held_out
        self._delay, self._slow, self._slow_reset, self._seed = delay, slow, slow_reset, seed
        self._luck: random.Random = random.SystemRandom()
        self._env = make(env, args or {}, held_out)

    def __getattr__(self, name: str) -> Any:
        """What a player looks at is the environment's own."""
        if name == "_env":  # not made yet
            raise AttributeError(name)
        return getattr(self._env, name)

    def reset(self, seed: int) -> Any:
        if self._seed is not None:
            self._luck = random.Random(f"chaos {self._seed} {seed}")
        self._wait(RESET)
        if not self._calm and self._luck.random() < self._slow:
            time.sleep(self._slow_reset)
        observation = self._env.reset(seed)
        return self._spoil(observation, lambda text: text)

    def step(self, action: str) -> Any:
        self._wait(STEP)
        return self._spoil(self._env.step(action), lambda text: (text, 0.0, False))

    def close(self) -> None:
        self._env.close()

    def _wait(self, quantiles: tuple[tuple[float, float], ...]) -> None:
        if self._delay and not self._calm:
            time.sleep(self._delay * draw(quantiles, self._luck))

    def _spoil(self, answer: Any, said: Callable[[str], Any]) -> Any:
        fault = None if self._calm else self._fault()
        if fault == "hang":
            while True:
                signal.pause()
        if fault == "crash":
            crash(self._luck.choice(CRASHES))
        if fault == "wrong":
            return wrong_answer(self._luck)
        return said(hostile_text(self._luck)) if fault == "hostile" else answer

    def _fault(self) -> str | None:
        at = self._luck.random()
        for name, rate in self._rates.items():
            at -= rate
            if at < 0:
                return name
        return None


def crash(how: str) -> None:
    if how == "exit":
        os._exit(3)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "interrupt":
        raise KeyboardInterrupt
    raise RuntimeError("chaos raised this")
