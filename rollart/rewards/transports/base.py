"""The interface to a serverless platform: one request, one response, and three kinds of failure."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Protocol

import msgspec

from rollart.config import RewardConfig
from rollart.rewards.wire import RESPONSE_BYTES, RewardResponse

BUSY, RETRYABLE = (429, 503), (408, 425)


class CallFailed(Exception):
    """This attempt failed; a retry may succeed."""


class PlatformBusy(CallFailed):
    """The platform is overloaded. `after` are the seconds of its Retry-After, if it sent one."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class CallRefused(CallFailed):
    """A retry cannot succeed."""


@dataclass(frozen=True, slots=True)
class TransportReply:
    """`billed_s` is what the platform charges for, if it reports that; `first_byte_s` is the time to the first byte."""

    response: RewardResponse
    first_byte_s: float
    billed_s: float
    cold: bool


class RewardTransport(Protocol):
    async def start(self) -> None:
        """Raises ServiceError for what is known to be wrong before the first call."""
        ...

    async def send(self, body: bytes, key: str, deadline: float) -> TransportReply:
        """One request. Raises CallFailed. The caller enforces the deadline; some clients need it too."""
        ...

    async def close(self) -> None: ...


BuildTransport = Callable[[RewardConfig, float, str | None], RewardTransport]  # with the deadline and the Ray cluster


def failure_of(status: int, reason: str, after: float | None) -> CallFailed:
    """The failure that an HTTP status means; 0 if there was none. `after` is the Retry-After of a busy platform."""
    if status in BUSY:
        return PlatformBusy(reason, after)
    return CallRefused(reason) if 0 < status < 500 and status not in RETRYABLE else CallFailed(reason)


def retry_after(value: str | None) -> float | None:
    """Seconds, from a number or a date."""
    if value is None:
        return None
    try:
        number = value.strip().isdecimal()
        return max(0.0, float(value) if number else parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def decode_response(body: bytes) -> RewardResponse:
    """Raises CallFailed if `body` is no response."""
    if len(body) > RESPONSE_BYTES:
        raise response_too_long()
    try:
        return msgspec.json.decode(body, type=RewardResponse)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CallFailed(f"the response is not a reward ({error}): {error_text(body)}") from error


def response_too_long() -> CallFailed:
    return CallFailed(f"the response has more than {RESPONSE_BYTES:,} bytes")


def error_text(body: bytes) -> str:
    """The error in `body`, or the beginning of it."""
    try:
        error = msgspec.json.decode(body, type=RewardResponse).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        error = ""
    return error or repr(body[:200].decode("utf-8", "replace"))
