"""Parses and checks what an environment returns. Pure: values from the wire in, `core.types` out."""

import math
import reprlib
from typing import Any

from rollart.core.types import Message, Step

FIELDS = ("messages", "reward", "done", "truncated", "info")
ROLES = ("system", "user", "assistant", "tool", "developer")
MAX_DEPTH = 32  # of `info`, which is stored
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 60


class InvalidReply(ValueError):
    """The message says what was returned and what is expected."""


def parse_observation(value: Any) -> tuple[Message, ...]:
    """Text is one user message; otherwise a list of `{"role", "content"}`. There must be something to react to."""
    messages = _messages(value)
    if not messages:
        raise InvalidReply("it returned no message, though the episode goes on")
    return messages


def parse_step(value: Any) -> Step:
    """From `(observation, reward or None, done)`, or from a dict of the fields of `Step`."""
    if isinstance(value, list):
        if len(value) != 3:
            raise InvalidReply(f"`step` returned {len(value)} values; expected (observation, reward, done) or a dict")
        value = dict(zip(("messages", "reward", "done"), value, strict=True))
    if not isinstance(value, dict):
        raise InvalidReply(f"`step` returned {_describe(value)}; expected (observation, reward, done) or a dict")
    unknown = [name for name in value if name not in FIELDS]
    if unknown:
        raise InvalidReply(f"`step` returned an unknown field {_short(unknown[0])}; the fields are {', '.join(FIELDS)}")
    done, truncated = value.get("done", False), value.get("truncated", False)
    for name, flag in (("done", done), ("truncated", truncated)):
        if not isinstance(flag, bool):
            raise InvalidReply(f"`{name}` is {_describe(flag)}; expected true or false")
    over = done or truncated
    content = value.get("messages", "" if over else None)
    return Step(
        messages=_messages(content) if over else parse_observation(content),
        reward=_reward(value.get("reward")),
        done=over,
        truncated=truncated,
        info=_info(value.get("info", {})),
    )


def _messages(value: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message("user", _text(value)),)
    if not isinstance(value, list):
        raise InvalidReply(f"an observation is {_describe(value)}; expected text or a list of messages")
    return tuple(_message(item) for item in value)


def _message(value: Any) -> Message:
    if not isinstance(value, dict) or set(value) != {"role", "content"}:
        raise InvalidReply(f'a message is {_describe(value)}; expected {{"role": text, "content": text}}')
    for name in ("role", "content"):
        if not isinstance(value[name], str):
            raise InvalidReply(f"the `{name}` of a message is {_describe(value[name])}; expected text")
    if value["role"] not in ROLES:
        raise InvalidReply(f"the role of a message is {_short(value['role'])}; expected one of {', '.join(ROLES)}")
    return Message(value["role"], _text(value["content"]))


def _text(value: str) -> str:
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError:
        raise InvalidReply("a text contains a lone surrogate, which is not a character") from None
    return value


def _info(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidReply(f"`info` is {_describe(value)}; expected a dict")
    if not _storable(value, MAX_DEPTH):
        raise InvalidReply(f"`info` is nested deeper than {MAX_DEPTH} levels, or has an integer of more than 64 bits")
    return value


def _storable(value: Any, depth: int) -> bool:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_storable(item, depth - 1) for item in inner)
    return not isinstance(value, int) or -(2**63) <= value < 2**64


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise InvalidReply(f"`reward` is {_describe(value)}; expected a number or None")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise InvalidReply("`reward` is not finite; expected a finite number or None")
    return reward


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(_short, list(value)[:5])) or 'nothing'}"
    return f"{_short(value)} ({type(value).__name__})"


def _short(value: Any) -> str:
    """A short `repr`, also of what is nested deeply."""
    return SHORT.repr(value)[:60]
