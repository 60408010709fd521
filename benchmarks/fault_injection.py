"""Fault injection for any environment: delays, hangs, crashes, invalid replies and hostile texts, at given rates.

For tests and benchmarks. Standard library only. The delays are drawn from distributions measured in production: the
quantiles, in seconds, are of software-engineering environments as the RollArt paper plots them. A reset pulls an image
and starts a container, and one in fifty falls into a second mode of six to eight minutes; a step runs a command.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

from rollart.envs.process_entry import make

FAULTS = ("hang", "crash", "wrong", "hostile")
CRASHES = ("exit", "segfault", "kill", "raise", "interrupt")
Quantiles = tuple[tuple[float, float], ...]
RESET_QUANTILES = ((0.0, 13.0), (0.05, 14.2), (0.25, 15.1), (0.5, 22.2), (0.75, 25.6), (0.9, 35.2), (0.95, 40.6),
                   (0.979, 51.0), (0.9791, 378.0), (0.99, 393.0), (1.0, 488.0))  # fmt: skip
STEP_QUANTILES = ((0.0, 0.5), (0.05, 1.0), (0.25, 2.5), (0.5, 3.8), (0.75, 5.7), (0.9, 8.4), (0.95, 10.9),
                  (0.98, 15.3), (0.99, 19.7), (1.0, 51.0))  # fmt: skip


def draw(quantiles: Quantiles, rng: random.Random) -> float:
    """Inverse of the distribution function, linear between the given points."""
    at = rng.random()
    for (before, low), (after, high) in itertools.pairwise(quantiles):
        if at <= after:
            return low + (high - low) * (at - before) / (after - before)
    return quantiles[-1][1]


class Chaos:
    """`env` (`module:Class` with `args`), with the rate of each fault per reset and step.

    `hang` never returns, `crash` ends the process in one of several ways or raises, `wrong` returns an invalid reply,
    `hostile` a valid but nasty text. `delay` scales the delays measured in production; `slow` is the share of resets
    that take `slow_reset` seconds longer. With a `seed` an episode's faults follow from it and the episode's own;
    without one every process draws its own. Held-out episodes have no faults.
    """

    reset_quantiles: Quantiles = RESET_QUANTILES

    def __init__(
        self,
        env: str,
        args: dict[str, Any] | None = None,
        *,
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
        self._held_out = held_out
        self._delay, self._slow, self._slow_reset, self._seed = delay, slow, slow_reset, seed
        self._rng: random.Random = random.SystemRandom()
        self._env = make(env, args or {}, held_out)

    def __getattr__(self, name: str) -> Any:
        """A player sees the attributes of the environment itself."""
        if name == "_env":  # not made yet
            raise AttributeError(name)
        return getattr(self._env, name)

    def reset(self, seed: int) -> Any:
        if self._seed is not None:
            self._rng = random.Random(f"chaos {self._seed} {seed}")
        self._wait(self.reset_quantiles)
        if not self._held_out and self._rng.random() < self._slow:
            time.sleep(self._slow_reset)
        observation = self._env.reset(seed)
        return self._inject(observation, lambda text: text)

    def step(self, action: str) -> Any:
        self._wait(STEP_QUANTILES)
        return self._inject(self._env.step(action), lambda text: (text, 0.0, False))

    def close(self) -> None:
        self._env.close()

    def _wait(self, quantiles: Quantiles) -> None:
        if self._delay and not self._held_out:
            time.sleep(self._delay * draw(quantiles, self._rng))

    def _inject(self, reply: Any, valid: Callable[[str], Any]) -> Any:
        fault = None if self._held_out else self._draw_fault()
        if fault == "hang":
            while True:
                signal.pause()
        if fault == "crash":
            crash(self._rng.choice(CRASHES))
        if fault == "wrong":
            return invalid_reply(self._rng)
        return valid(hostile_text(self._rng)) if fault == "hostile" else reply

    def _draw_fault(self) -> str | None:
        at = self._rng.random()
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


# Hostile texts and invalid replies

SPECIAL = (
    *("<|im_end|>", "<|im_start|>assistant\n", "<|assistant|>", "<|user|>", "<|endoftext|>", "<|pad|>", "<|eot_id|>"),
    *("</s>", "<s>", "[INST]", "<think>", "</think>", "<tool_call>"),
)
TEMPLATES = (
    "{{ 1/0 }}",
    "{% for x in y %}",
    "{{ messages }}",
    "{% raw %}",
    "Marker-of-an-action",
    "Marker-of-a-message",
)
DEEP = 5000
HUGE = 3_000_000


def hostile_text(rng: random.Random) -> str:
    """A valid observation that probes for weaknesses."""
    return rng.choice(TEXTS)(rng)


def invalid_reply(rng: random.Random) -> Any:
    """What `reset` and `step` must not return; a few of them pass as valid."""
    return rng.choice(REPLIES)(rng)


def _controls(rng: random.Random) -> str:
    return "".join(chr(rng.choice((*range(32), 127, *range(128, 160), 0x202E, 0x200B, 0xFEFF))) for _ in range(50))


def _anything(rng: random.Random) -> str:
    return "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(200)))


def _surrogates(rng: random.Random) -> str:
    return "lone surrogate " + chr(rng.randrange(0xD800, 0xE000))


def _special(rng: random.Random) -> str:
    return "".join(rng.choices((*SPECIAL, *TEMPLATES, "a", "\n"), k=8))


def _long(rng: random.Random) -> str:
    (length,) = rng.choices((1000, 20_000, HUGE // 10), (200, 10, 1))
    return rng.choice(("a", "\n", "\U0001f600", "a ", "<|im_end|>")) * length


TEXTS: tuple[Callable[[random.Random], str], ...] = (
    *(_controls, _anything, _surrogates, _special, _long),
    lambda rng: "",
    lambda rng: '{"id": 1, "value": ["hello", 1.0, true]}\n{"ended": "by itself"}\n',
)


def _deep(rng: random.Random) -> Any:
    value: Any = rng.choice((1, "x", None))
    for _ in range(rng.choice((50, 900, DEEP))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def _circle(rng: random.Random) -> Any:
    value: dict[str, Any] = {"messages": "x", "reward": 0.0, "done": False}
    return {**value, "info": {"me": value, "value": value}} if rng.random() < 0.5 else _itself()


def _itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _step(**wrong: Callable[[random.Random], Any]) -> Callable[[random.Random], Any]:
    """A valid step but for some fields."""
    right: dict[str, Any] = {"messages": "go on", "reward": 0.5, "done": False, "info": {}}
    return lambda rng: right | {name: make(rng) for name, make in wrong.items()}


ODD_NUMBERS = (float("nan"), float("inf"), -float("inf"), 1e308, 10**30, 10**400, -(2**63) - 1, True, "1", [1], 1j)
REPLIES: tuple[Callable[[random.Random], Any], ...] = (
    *(
        _deep,
        _circle,
        lambda rng: object(),
        lambda rng: {1, 2},
        lambda rng: b"bytes",
        lambda rng: None,
        lambda rng: print,
    ),
    lambda rng: rng.choice(ODD_NUMBERS),
    lambda rng: [hostile_text(rng) for _ in range(rng.randrange(5))],
    lambda rng: [
        {"role": rng.choice(("user", "wizard", "", hostile_text(rng))), "content": hostile_text(rng)} for _ in range(3)
    ],
    lambda rng: [{"role": "user", "content": "x", "extra": 1}],
    lambda rng: [{"role": "user", "content": "x"}] * rng.choice((0, 1000, 20_000)),
    lambda rng: "x" * (2 * HUGE),
    lambda rng: {1: 2, None: 3, hostile_text(rng): 4},
    lambda rng: {"messages": "x", "done": True, "surprise": 1},
    lambda rng: ("x", 1.0),
    lambda rng: (hostile_text(rng), rng.choice(ODD_NUMBERS), rng.choice((False, True, None, 0, "no"))),
    _step(reward=lambda rng: rng.choice(ODD_NUMBERS)),
    _step(done=lambda rng: rng.choice((None, 1, "yes", []))),
    _step(info=_deep),
    _step(info=lambda rng: {"number": rng.choice(ODD_NUMBERS), hostile_text(rng): hostile_text(rng)}),
    _step(info=lambda rng: {"nested": _deep(rng)}),
    _step(messages=_deep),
    _step(messages=hostile_text, info=lambda rng: {"success": rng.choice((None, "yes", 1, float("nan")))}),
)
