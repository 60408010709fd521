"""Files of conversations: one JSON object per line, with `messages`, a list of `{"role": ..., "content": ...}`.

The messages of the assistant are learnt. Other keys beside `messages` are ignored; other keys of a message are refused,
because what they say would be lost.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollart.core.errors import ConfigError
from rollart.core.types import EpisodeTurn, Message

ROLES = ("system", "user", "assistant", "tool")


class ChatLine(msgspec.Struct, forbid_unknown_fields=True):
    """A message as in the file."""

    role: str
    content: str


class _ConversationLine(msgspec.Struct):
    messages: list[ChatLine]


def read_conversations(path: Path) -> Iterator[tuple[int, list[EpisodeTurn]]]:
    """The number of each line and its turns. Messages after the last of the assistant are left out. Raises ConfigError
    in a sentence that names the file and the line."""
    decoder = msgspec.json.Decoder(_ConversationLine)
    found = False
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found = True
                    try:
                        yield number, turns_of(decoder.decode(line).messages)
                    except (ValueError, msgspec.DecodeError) as error:
                        raise ConfigError(f"{path}:{number}: {_sentence(error)}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the conversations {path}: {error.strerror}") from None
    if not found:
        raise ConfigError(f"{path} has no conversations")


def conversations_problem(path: Path) -> str | None:
    """What is wrong with the first line that cannot be used."""
    try:
        for _ in read_conversations(path):
            pass
    except ConfigError as error:
        return str(error)
    return None


def turns_of(messages: list[ChatLine]) -> list[EpisodeTurn]:
    """Raises ValueError about a conversation that cannot be learnt."""
    turns: list[EpisodeTurn] = []
    waiting: list[Message] = []
    for number, message in enumerate(messages):
        if message.role not in ROLES:
            raise ValueError(f"messages[{number}] has the role {message.role!r}, which is none of {', '.join(ROLES)}")
        if message.role != "assistant":
            waiting.append(Message(message.role, message.content))
        elif waiting:
            turns.append(EpisodeTurn(tuple(waiting), message.content))
            waiting = []
        else:
            before = "follows another one" if turns else "comes first"
            raise ValueError(f"messages[{number}] is of the assistant and {before}; it needs one to answer")
    if not turns:
        raise ValueError("the conversation has no message of the assistant, so there is nothing to learn")
    return turns


def _sentence(error: Exception) -> str:
    """As msgspec says it, in the words of the format."""
    if not isinstance(error, msgspec.DecodeError):
        return str(error)
    what, _, place = str(error).partition(" - at ")
    if not isinstance(error, msgspec.ValidationError):
        return f"this is not JSON: {what}"
    where = place.strip("`").removeprefix("$").removeprefix(".") or "the line"
    return f'{where}: {what}; a line is {{"messages": [{{"role": "user", "content": "..."}}, ...]}}'
