"""Hostile texts and invalid replies of an environment, drawn at random, for tests and fault injection."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

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


def text(rng: random.Random) -> str:
    """A valid observation that probes for weaknesses."""
    return rng.choice(TEXTS)(rng)


def reply(rng: random.Random) -> Any:
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
    lambda rng: [text(rng) for _ in range(rng.randrange(5))],
    lambda rng: [{"role": rng.choice(("user", "wizard", "", text(rng))), "content": text(rng)} for _ in range(3)],
    lambda rng: [{"role": "user", "content": "x", "extra": 1}],
    lambda rng: [{"role": "user", "content": "x"}] * rng.choice((0, 1000, 20_000)),
    lambda rng: "x" * (2 * HUGE),
    lambda rng: {1: 2, None: 3, text(rng): 4},
    lambda rng: {"messages": "x", "done": True, "surprise": 1},
    lambda rng: ("x", 1.0),
    lambda rng: (text(rng), rng.choice(ODD_NUMBERS), rng.choice((False, True, None, 0, "no"))),
    _step(reward=lambda rng: rng.choice(ODD_NUMBERS)),
    _step(done=lambda rng: rng.choice((None, 1, "yes", []))),
    _step(info=_deep),
    _step(info=lambda rng: {"number": rng.choice(ODD_NUMBERS), text(rng): text(rng)}),
    _step(info=lambda rng: {"nested": _deep(rng)}),
    _step(messages=_deep),
    _step(messages=text, info=lambda rng: {"success": rng.choice((None, "yes", 1, float("nan")))}),
)
