"""What the APIs share: each turns bytes into an `Ask`, and an answer or an error into its own JSON."""

import re
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from rollart.gateway.errors import ApiError, invalid
from rollart.gateway.messages import ChatMessage, CompletionChoice, CompletionRequest, CompletionResponse
from rollart.gateway.tenant import Tenant

T = TypeVar("T")
_AT = re.compile(r" - at `\$\.?(.*)`$")
DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


class Api(Protocol):
    """`speaks`: its streams are text, which can be shown while the answer is being made."""

    speaks: bool

    def parse(self, body: bytes, tenant: Tenant) -> CompletionRequest:
        """Raises ApiError."""
        ...

    def whole(self, ask: CompletionRequest, answer: CompletionResponse) -> Any: ...

    def writer(self, ask: CompletionRequest) -> "Writer": ...

    def error(self, error: ApiError) -> Any: ...

    def served(self, ask: CompletionRequest, answer: CompletionResponse, tenant: Tenant) -> None:
        """The answer was delivered."""
        ...


class Writer(Protocol):
    """One answer as server-sent events."""

    def text(self, answer: CompletionResponse, index: int, piece: str) -> bytes:
        """More of what the choice of that index says, while the answer is being made."""
        ...

    def end(self, answer: CompletionResponse, shown: Sequence[int]) -> bytes:
        """All the rest: of each choice, so many characters were written already."""
        ...


class Part(msgspec.Struct):
    """A piece of a message. Only text can be read."""

    type: str = "text"
    text: str | None = None


def read(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        found = _AT.search(str(error))
        raise invalid(_AT.sub("", str(error)), param=found[1] if found else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from None


def text_of(content: str | Sequence[Part] | None, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    other = next((part.type for part in content if part.text is None), None)
    if other is not None:
        raise invalid(f"content of type {other!r} cannot be read here: this model knows text only", param)
    return "".join(part.text or "" for part in content)


def event(data: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(data) + b"\n\n"


class Format(msgspec.Struct):
    """How an answer is to be written."""

    type: str = "text"


def check_format(format: Format | None, param: str) -> None:
    """Raises ApiError for what would have to be enforced while tokens are drawn: what is trained is drawn freely."""
    if format is not None and format.type != "text":
        raise invalid(
            f"answers of the format {format.type!r} are not offered here, only text: say in a message what form the "
            "answer shall have, and check it",
            f"{param}.type",
        )


def texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def conversation(ask: CompletionRequest, choice: CompletionChoice) -> tuple[ChatMessage, ...]:
    return (*ask.messages, ChatMessage("assistant", choice.text, choice.calls))
