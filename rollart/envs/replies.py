"""Parses and checks what an environment returns. Pure: values from the wire in, `core.types` out."""

from typing import Any

from rollart.core.foreign import InvalidValue, describe, finite, short, storable, text
from rollart.core.types import Message, Step

FIELDS = ("messages", "reward", "done", "truncated", "info")
ROLES = ("system", "user", "assistant", "tool", "developer", "tools")


def parse_observation(value: Any) -> tuple[Message, ...]:
    """Text is one user message; otherwise a list of `{"role", "content"}`. There must be something to react to."""
    messages = _messages(value)
    if not messages:
        raise InvalidValue("it returned no message, though the episode goes on")
    return messages


def parse_step(value: Any) -> Step:
    """From `(observation, reward or None, done)`, or from a dict of the fields of `Step`."""
    if isinstance(value, list):
        if len(value) != 3:
            raise InvalidValue(f"`step` returned {len(value)} values; expected (observation, reward, done) or a dict")
        value = dict(zip(("messages", "reward", "done"), value, strict=True))
    if not isinstance(value, dict):
        raise InvalidValue(f"`step` returned {describe(value)}; expected (observation, reward, done) or a dict")
    unknown = [name for name in value if name not in FIELDS]
    if unknown:
        raise InvalidValue(f"`step` returned an unknown field {short(unknown[0])}; the fields are {', '.join(FIELDS)}")
    done, truncated = value.get("done", False), value.get("truncated", False)
    for name, flag in (("done", done), ("truncated", truncated)):
        if not isinstance(flag, bool):
            raise InvalidValue(f"`{name}` is {describe(flag)}; expected true or false")
    over = done or truncated
    content = value.get("messages", "" if over else None)
    return Step(
        messages=_messages(content) if over else parse_observation(content),
        reward=None if value.get("reward") is None else finite("`reward`", value["reward"]),
        done=over,
        truncated=truncated,
        info=storable("`info`", value.get("info", {})),
    )


def _messages(value: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message("user", text("a text", value)),)
    if not isinstance(value, list):
        raise InvalidValue(f"an observation is {describe(value)}; expected text or a list of messages")
    return tuple(_message(item) for item in value)


def _message(value: Any) -> Message:
    if not isinstance(value, dict) or set(value) != {"role", "content"}:
        raise InvalidValue(f'a message is {describe(value)}; expected {{"role": text, "content": text}}')
    role, content = (text(f"the `{name}` of a message", value[name]) for name in ("role", "content"))
    if role not in ROLES:
        raise InvalidValue(f"the role of a message is {short(role)}; expected one of {', '.join(ROLES)}")
    return Message(role, content)
