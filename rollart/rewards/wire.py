"""What travels between a caller of rewards and the function, wherever that runs, and how it is signed.

A request is `{"episode": {...}}`, with `function`, `version` and `args` beside it; `{"episodes": [...]}` for several.
Its answer is `{"value", "parts", "success"}`, `{"results": [...]}` of such answers in the same order, or `{"error"}`.
Needs nothing but msgspec, because it is packaged with every reward function.
"""

import hashlib
import hmac
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from rollart.core.types import Episode, RewardResult

KEY, TIMESTAMP, SIGNATURE = "Idempotency-Key", "Rollart-Timestamp", "Rollart-Signature"
SECRET = "ROLLART_REWARD_SECRET"  # the variable that a served function reads its secret from
WINDOW_S = 300.0  # a signed request older than this is refused
REQUEST_BYTES, ANSWER_BYTES = 32_000_000, 1_000_000
MOST_PARTS = 1000


class Request(Struct, omit_defaults=True):
    """`function` and `version` are what the caller expects to find; empty: whatever is there."""

    episode: Episode | None = None
    episodes: list[Episode] | None = None
    function: str = ""
    version: str = ""
    args: dict[str, Any] = {}


class Answer(Struct, omit_defaults=True):
    """`seconds` is what the call cost there, `cold` that the process had served nothing before, `batch` how many
    episodes the function takes at once."""

    value: float | None = None
    parts: dict[str, float] = {}
    success: bool | None = None
    error: str = ""
    results: list["Answer"] | None = None
    seconds: float = 0.0
    cold: bool = False
    batch: int = 1
    version: str = ""

    def result(self) -> RewardResult:
        """Raises ValueError for anything but a reward in good order."""
        if self.error:
            raise ValueError(self.error)
        if self.value is None:
            raise ValueError("the answer has no `value`")
        return checked(RewardResult(self.value, self.parts, self.success))


def answer_of(result: RewardResult) -> Answer:
    return Answer(result.value, result.parts, result.success)


def idempotency_key(request: bytes) -> str:
    """The same for the same question: a reward is a pure function, so whoever has its answer may give it again."""
    return hashlib.sha256(request).hexdigest()


def sign(secret: str, body: bytes, now: float) -> dict[str, str]:
    """The headers that show that the caller knows the secret, and when it said so."""
    stamp = str(int(now))
    return {TIMESTAMP: stamp, SIGNATURE: _signature(secret, stamp, body)}


def unsigned(secret: str, headers: Mapping[str, str], body: bytes, now: float) -> str:
    """Why a request is not to be trusted; empty if it is. The names of `headers` are in lower case."""
    stamp, given = headers.get(TIMESTAMP.lower(), ""), headers.get(SIGNATURE.lower(), "")
    if not stamp or not given:
        return f"the request is not signed; the caller needs the secret of this function ({SECRET})"
    if not hmac.compare_digest(given.encode(), _signature(secret, stamp, body).encode()):
        return "the signature of the request is wrong; caller and function have different secrets"
    if not stamp.isdecimal() or abs(now - int(stamp[:15])) > WINDOW_S:
        return f"the request was signed more than {WINDOW_S:g} s from now; it is a replay, or a clock is wrong"
    return ""


def _signature(secret: str, stamp: str, body: bytes) -> str:
    return "sha256=" + hmac.new(secret.encode(), stamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def checked(answer: object) -> RewardResult:
    """A finite number is a result without parts; anything else must be a RewardResult in good order."""
    result = answer if isinstance(answer, RewardResult) else RewardResult(finite("it", answer))
    if result.success is not None and not isinstance(result.success, bool):
        raise TypeError(f"`success` is {result.success!r:.60}; true, false or None is wanted")
    if not isinstance(result.parts, dict):
        raise TypeError(f"`parts` is {result.parts!r:.60}; a dict of numbers is wanted")
    if len(result.parts) > MOST_PARTS:
        raise ValueError(f"it has {len(result.parts):,} parts, more than the limit of {MOST_PARTS:,}")
    parts = {str(name): finite(f"part {name!r}", value) for name, value in result.parts.items()}
    return RewardResult(finite("`value`", result.value), parts, result.success)


def finite(what: str, value: object) -> float:
    if not isinstance(value, int | float) and hasattr(value, "item"):
        value = value.item()  # numpy and torch scalars
    if not isinstance(value, int | float):
        raise TypeError(f"{what} is {value!r:.60} ({type(value).__name__}); a number or a RewardResult is wanted")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {value}; a finite number is wanted")
    return float(value)


def encode(message: Request | Answer) -> bytes:
    return msgspec.json.encode(message)
