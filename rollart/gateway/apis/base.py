"""What the APIs share: each parses bytes into a CompletionRequest, and writes responses and errors as its own JSON."""

import re
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from rollart.gateway.errors import ApiError, invalid
from rollart.gateway.messages import CompletionRequest, CompletionResponse
from rollart.gateway.session import EpisodeSession

T = TypeVar("T")
_AT = re.compile(r" - at `\$\.?(.*)`$")
DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


class Api(Protocol):
    """`streams_text`: text can be sent while it is generated."""

    streams_text: bool = True

    def parse(self, body: bytes, session: EpisodeSession) -> CompletionRequest:
        """Raises ApiError."""
        ...

    def response_body(self, request: CompletionRequest, response: CompletionResponse) -> Any: ...

    def writer(self, request: CompletionRequest) -> "StreamWriter": ...

    def error(self, error: ApiError) -> Any: ...

    def on_delivered(self, request: CompletionRequest, response: CompletionResponse, session: EpisodeSession) -> None:
        """Called when the response was delivered. Most store nothing: their clients repeat the conversation."""
        return


class StreamWriter(Protocol):
    """Writes one response as server-sent events."""

    def text(self, response: CompletionResponse, index: int, piece: str) -> bytes:
        """More text of the choice of that index."""
        ...

    def end(self, response: CompletionResponse, sent: Sequence[int]) -> bytes:
        """All the rest; `sent` characters of each choice were written already."""
        ...


class ContentPart(msgspec.Struct):
    """A part of a message. Only text is supported."""

    type: str = "text"
    text: str | None = None


def decode_body(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        found = _AT.search(str(error))
        raise invalid(_AT.sub("", str(error)), param=found[1] if found else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from None


def text_of(content: str | Sequence[ContentPart] | None, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    other = next((part.type for part in content if part.text is None), None)
    if other is not None:
        raise invalid(f"content of type {other!r} is not supported: this model reads text only", param)
    return "".join(part.text or "" for part in content)


def event(data: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(data) + b"\n\n"


class ResponseFormat(msgspec.Struct):
    """`response_format` and the like."""

    type: str = "text"


def check_format(format: ResponseFormat | None, param: str) -> None:
    """Raises ApiError for all but text: a format would have to constrain sampling, and training assumes that nothing
    does."""
    if format is not None and format.type != "text":
        raise invalid(
            f"responses of the format {format.type!r} are not supported, only text: ask for the format in a message, "
            "and check the response",
            f"{param}.type",
        )
