"""The one gate for values of foreign code: environments, agents, rewards and verdict files. Standard library only.

Invariants: what passes can be stored, sent and logged as it is; what does not raises InvalidValue, and nothing else,
with a sentence that says what was returned and what is expected. That holds for values of any type, size and depth,
cyclic ones included.
"""

from __future__ import annotations

import json
import math
import reprlib
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 32  # of what is stored
MAX_VALUES = 100_000
MAX_CHARACTERS = 4_000_000
_DECODER = json.JSONDecoder()
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


# Raised by code that would do the same again. Bad JSON is not: it may have come from a server.
_BUGS = {"ArithmeticError", "AssertionError", "AttributeError", "ImportError", "LookupError", "NameError",
         "NotImplementedError", "RecursionError", "SyntaxError", "TypeError", "ValueError"}  # fmt: skip


class InvalidValue(ValueError):
    """The message says what was returned and what is expected."""


@dataclass(frozen=True)
class Verdict:
    """How a program scored its own episode. Without a reward it is left to the reward function."""

    reward: float | None = None
    success: bool | None = None
    info: dict[str, Any] = field(default_factory=dict)


def is_bug(classes: Any) -> bool:
    """Whether a pure function that raised an exception of these classes, by name, would raise it again."""
    return isinstance(classes, list) and not _BUGS.isdisjoint(map(str, classes)) and "JSONDecodeError" not in classes


def parse_verdict(value: Any, key: str = "reward") -> Verdict:
    """A number is the reward, a bool is success too; a dict may have `reward` (or another `key`), `success` and `info`,
    and whatever else it has is info."""
    if value is None:
        return Verdict()
    if isinstance(value, bool):
        return Verdict(float(value), value)
    if not isinstance(value, dict):
        return Verdict(finite(f"`{key}`", value))
    named = {name: value[name] for name in value if name not in (key, "success", "info")}
    own = value.get("info")
    if own is not None and not isinstance(own, dict):
        raise InvalidValue(f"`info` is {describe(own)}; expected a dict")
    reward = value.get(key)
    return Verdict(
        reward=None if reward is None else finite(f"`{key}`", reward),
        success=flag("`success`", value.get("success")),
        info=storable("`info`", {**named, **(own or {})}),
    )


def finite(what: str, value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise InvalidValue(f"{what} is {describe(value)}; expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidValue(f"{what} is not finite; expected a finite number")
    return number


def flag(what: str, value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise InvalidValue(f"{what} is {describe(value)}; expected true, false or None")
    return value


def text(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidValue(f"{what} is {describe(value)}; expected text")
    if not _encodable(value):
        raise InvalidValue(f"{what} contains a lone surrogate, which is not a character")
    return value


def storable(what: str, value: Any) -> dict[str, Any]:
    """A dict of plain values: text, finite numbers of at most 64 bits, lists and dicts with text as keys."""
    if not isinstance(value, dict):
        raise InvalidValue(f"{what} is {describe(value)}; expected a dict")
    if value:
        _Budget(what).spend(value, MAX_DEPTH)
    return value


def parse_json(source: str) -> Any:
    """What a model wrote as JSON, or None: also for what is nested deeply, huge, not finite, or not JSON at all."""
    try:
        value = json.loads(source)
        _Budget("it", stored=False).spend(value, MAX_DEPTH)
    except (ValueError, RecursionError):
        return None
    return value


def parse_json_at(source: str, at: int) -> tuple[Any, int]:
    """As `parse_json` for the value that begins at `at`, and where it ends; None and `at` if there is none."""
    try:
        value, end = _DECODER.raw_decode(source, at)
        _Budget("it", stored=False).spend(value, MAX_DEPTH)
    except (ValueError, RecursionError):
        return None, at
    return value, end


class _Budget:
    """What a value may still have. A cyclic one exceeds it. What is not `stored` may have integers of any size."""

    def __init__(self, what: str, stored: bool = True) -> None:
        self._what, self._values, self._characters, self._stored = what, MAX_VALUES, MAX_CHARACTERS, stored

    def spend(self, value: Any, depth: int) -> None:
        self._values -= 1
        if self._values < 0:
            raise InvalidValue(f"{self._what} has more than {MAX_VALUES:,} values")
        if value is None or isinstance(value, bool):
            return
        if isinstance(value, str):
            self._text(value)
        elif isinstance(value, int):
            if self._stored and not -(2**63) <= value < 2**64:
                raise InvalidValue(f"{self._what} has an integer of more than 64 bits")
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise InvalidValue(f"{self._what} has a number that is not finite")
        elif isinstance(value, (dict, list, tuple)):
            self._inner(value, depth)
        else:
            raise InvalidValue(f"{self._what} has a value of type {type(value).__name__}; expected plain values")

    def _inner(self, value: Any, depth: int) -> None:
        if depth == 0:
            raise InvalidValue(f"{self._what} is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, dict):
            for name in value:
                if not isinstance(name, str):
                    raise InvalidValue(f"{self._what} has the key {describe(name)}; expected text")
                self._text(name)
            value = value.values()
        for item in value:
            self.spend(item, depth - 1)

    def _text(self, value: str) -> None:
        self._characters -= len(value)
        if self._characters < 0:
            raise InvalidValue(f"{self._what} has more than {MAX_CHARACTERS:,} characters")
        if not _encodable(value):
            raise InvalidValue(f"{self._what} contains a lone surrogate, which is not a character")


def _encodable(value: str) -> bool:
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict of {', '.join(short(key) for key in list(value)[:5]) or 'nothing'}"
    return f"{short(value)} ({type(value).__name__})"


def short(value: Any) -> str:
    """A short `repr`, also of what is nested deeply or cannot be shown."""
    try:
        return _SHORT.repr(value)[:60].encode("utf-8", "replace").decode()
    except Exception:  # its own __repr__, or an integer of too many digits
        return f"a {type(value).__name__}"
