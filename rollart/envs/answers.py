"""What an environment answers, made into our nouns or refused. Pure: values from the wire in, `core.types` out."""

import math
import reprlib
from typing import Any

from rollart.core.types import Message, Step

FIELDS = ("messages", "reward", "done", "truncated", "info")
ROLES = ("system", "user", "assistant", "tool", "developer")
DEPTH = 32  # of `info`, which is stored
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 60


class WrongAnswer(ValueError):
    """The sentence says what was answered and what is wanted."""


def observation(value: Any) -> tuple[Message, ...]:
    """Text is one user message; otherwise a list of `{"role", "content"}`. There must be something to react to."""
    messages = _messages(value)
    if not messages:
        raise WrongAnswer("it gave no message, though the episode goes on")
    return messages


def step(value: Any) -> Step:
    """From `(observation, reward or None, done)`, or from a dict of the fields of `Step`."""
    if isinstance(value, list):
        if len(value) != 3:
            raise WrongAnswer(f"`step` answered {len(value)} values; (observation, reward, done) or a dict is wanted")
        value = dict(zip(("messages", "reward", "done"), value, strict=True))
    if not isinstance(value, dict):
        raise WrongAnswer(f"`step` answered {_kind(value)}; (observation, reward, done) or a dict is wanted")
    unknown = [name for name in value if name not in FIELDS]
    if unknown:
        raise WrongAnswer(f"`step` answered an unknown field {_shown(unknown[0])}; the fields are {', '.join(FIELDS)}")
    done, truncated = value.get("done", False), value.get("truncated", False)
    for name, flag in (("done", done), ("truncated", truncated)):
        if not isinstance(flag, bool):
            raise WrongAnswer(f"`{name}` is {_kind(flag)}; true or false is wanted")
    over = done or truncated
    content = value.get("messages", "" if over else None)
    return Step(
        messages=_messages(content) if over else observation(content),
        reward=_reward(value.get("reward")),
        done=over,
        truncated=truncated,
        info=_info(value.get("info", {})),
    )


def _messages(value: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message("user", _text(value)),)
    if not isinstance(value, list):
        raise WrongAnswer(f"an observation is {_kind(value)}; text or a list of messages is wanted")
    return tuple(_message(item) for item in value)


def _message(value: Any) -> Message:
    if not isinstance(value, dict) or set(value) != {"role", "content"}:
        raise WrongAnswer(f'a message is {_kind(value)}; {{"role": text, "content": text}} is wanted')
    for name in ("role", "content"):
        if not isinstance(value[name], str):
            raise WrongAnswer(f"the `{name}` of a message is {_kind(value[name])}; text is wanted")
    if value["role"] not in ROLES:
        raise WrongAnswer(f"the role of a message is {_shown(value['role'])}; {', '.join(ROLES)} are the roles")
    return Message(value["role"], _text(value["content"]))


def _text(value: str) -> str:
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError:
        raise WrongAnswer("a text has half of a surrogate pair in it, which is no character") from None
    return value


def _info(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WrongAnswer(f"`info` is {_kind(value)}; a dict is wanted")
    if not _storable(value, DEPTH):
        raise WrongAnswer(f"`info` is nested deeper than {DEPTH} levels, or has a whole number of more than 64 bits")
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
        raise WrongAnswer(f"`reward` is {_kind(value)}; a number or None is wanted")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise WrongAnswer("`reward` is not finite; a finite number or None is wanted")
    return reward


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(_shown, list(value)[:5])) or 'nothing'}"
    return f"{_shown(value)} ({type(value).__name__})"


def _shown(value: Any) -> str:
    """A short `repr`, of what may be nested without end."""
    return SHORT.repr(value)[:60]
