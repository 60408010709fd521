"""The wire format of remote rewards, and its signature.

A request is `{"episode": {...}, "function", "version", "args"}`; `{"episodes": [...]}` for a batch. The response is
`{"value", "parts", "success"}`, `{"results": [...]}` of these in the same order, or `{"error"}`.
Depends on msgspec only: it is packaged with every reward function.
"""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from rollart.core.foreign import InvalidValue, describe, finite, flag, short, text
from rollart.core.types import Episode, RewardResult

IDEMPOTENCY_KEY, TIMESTAMP, SIGNATURE = "Idempotency-Key", "Rollart-Timestamp", "Rollart-Signature"
SECRET = "ROLLART_REWARD_SECRET"  # environment variable of a served function
WINDOW_S = 300.0  # a signed request older than this is refused
REQUEST_BYTES, RESPONSE_BYTES = 32_000_000, 1_000_000
MAX_PARTS = 1000


class RewardRequest(Struct, omit_defaults=True):
    """`function` and `version` are what the caller expects; empty: any."""

    episode: Episode | None = None
    episodes: list[Episode] | None = None
    function: str = ""
    version: str = ""
    args: dict[str, Any] = {}


class RewardResponse(Struct, omit_defaults=True):
    """`bug`: the function would raise the same `error` again. `seconds` is what the call took there; `cold`: it is the
    first of its process; `batch` is how many episodes the function takes at once."""

    value: float | None = None
    parts: dict[str, float] = {}
    success: bool | None = None
    error: str = ""
    results: list["RewardResponse"] | None = None
    seconds: float = 0.0
    cold: bool = False
    batch: int = 1
    version: str = ""
    bug: bool = False

    def result(self) -> RewardResult:
        """Raises ValueError if it is not a valid reward."""
        if self.error:
            raise ValueError(self.error)
        if self.value is None:
            raise ValueError("the response has no `value`")
        return checked(RewardResult(self.value, self.parts, self.success))


def idempotency_key(request: bytes) -> str:
    """Equal for equal requests: a reward is a pure function, so its response may be cached."""
    return hashlib.sha256(request).hexdigest()


def sign(secret: str, body: bytes, now: float) -> dict[str, str]:
    """Headers with the time and the signature of a request."""
    stamp = str(int(now))
    return {TIMESTAMP: stamp, SIGNATURE: _signature(secret, stamp, body)}


def signature_error(secret: str, headers: Mapping[str, str], body: bytes, now: float) -> str:
    """Why a request is not authentic; empty if it is. The names of `headers` are in lower case."""
    stamp, signature = headers.get(TIMESTAMP.lower(), ""), headers.get(SIGNATURE.lower(), "")
    if not stamp or not signature:
        return f"the request is not signed; the caller needs the secret of this function ({SECRET})"
    if not hmac.compare_digest(signature.encode(), _signature(secret, stamp, body).encode()):
        return "the signature of the request is wrong; caller and function have different secrets"
    if not stamp.isdecimal() or abs(now - int(stamp[:15])) > WINDOW_S:
        return f"the request was signed more than {WINDOW_S:g} s from now; it is a replay, or a clock is wrong"
    return ""


def _signature(secret: str, stamp: str, body: bytes) -> str:
    return "sha256=" + hmac.new(secret.encode(), stamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def checked(value: object) -> RewardResult:
    """A valid RewardResult, also from a finite number. Raises InvalidValue."""
    if not isinstance(value, RewardResult):
        if isinstance(number := _plain(value), int | float):
            return RewardResult(finite("it", number))
        raise InvalidValue(f"it is {describe(value)}; expected a number or a RewardResult")
    result = value
    if not isinstance(result.parts, dict):
        raise InvalidValue(f"`parts` is {describe(result.parts)}; expected a dict of numbers")
    if len(result.parts) > MAX_PARTS:
        raise InvalidValue(f"it has {len(result.parts):,} parts, more than the limit of {MAX_PARTS:,}")
    parts = {
        text("a name of `parts`", name): finite(f"part {short(name)}", _plain(n)) for name, n in result.parts.items()
    }
    return RewardResult(finite("`value`", _plain(result.value)), parts, flag("`success`", result.success))


def received(value: Any) -> RewardResult:
    """A result from a process of the local pool. Raises InvalidValue."""
    if not isinstance(value, dict):
        raise InvalidValue(f"it is {describe(value)}; expected a dict with `value`, `parts` and `success`")
    return checked(RewardResult(value.get("value"), value.get("parts") or {}, value.get("success")))  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    """Of numpy's and torch's scalars."""
    return value if isinstance(value, int | float) or not hasattr(value, "item") else value.item()
