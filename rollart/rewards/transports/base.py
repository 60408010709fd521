"""What a platform's client does for us: one request there, one answer back, and the three ways to have none."""

from dataclasses import dataclass
from typing import Protocol

import msgspec

from rollart.rewards.wire import ANSWER_BYTES, Answer


class NoAnswer(Exception):
    """This try has failed; the next may not."""


class Busy(NoAnswer):
    """Not now: the platform has no room. `after` is how many seconds it asked us to wait, if it did."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Refused(NoAnswer):
    """Asking again is of no use."""


@dataclass(frozen=True, slots=True)
class Reply:
    """`billed_s` is what the platform charges for, as far as it tells; `first_byte_s` is when the answer began."""

    answer: Answer
    first_byte_s: float
    billed_s: float
    cold: bool


class Transport(Protocol):
    async def start(self) -> None:
        """Raises ServiceError for what is known to be wrong before the first call."""
        ...

    async def send(self, body: bytes, key: str, deadline: float) -> Reply:
        """One request. Raises NoAnswer. Whoever calls keeps the deadline; it is told for clients that want it too."""
        ...

    async def close(self) -> None: ...


def decoded(body: bytes) -> Answer:
    """The answer in `body`. Raises NoAnswer for what is none."""
    if len(body) > ANSWER_BYTES:
        raise too_long()
    try:
        return msgspec.json.decode(body, type=Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NoAnswer(f"the answer is not a reward ({error}): {shown(body)}") from error


def too_long() -> NoAnswer:
    return NoAnswer(f"the answer has more than {ANSWER_BYTES:,} bytes")


def shown(body: bytes) -> str:
    """The error in `body`, or what it begins with."""
    try:
        told = msgspec.json.decode(body, type=Answer).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        told = ""
    return told or repr(body[:200].decode("utf-8", "replace"))
