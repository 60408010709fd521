"""The interface to a serverless platform: one request, one response, and three kinds of failure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from rollart.config import RewardConfig
from rollart.rewards.wire import RESPONSE_BYTES, RewardResponse


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
