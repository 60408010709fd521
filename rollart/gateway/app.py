"""The gateway over HTTP: which API a path is, whose key it shows, and what becomes of the answer.

Plain ASGI, because a framework around each of these requests would cost more than all the rest of the gateway.

The invariants:
- Nothing but `/health` is answered without a key, and a key sees its own tenant only. Keys are never logged or echoed.
- A body has a size and a time limit, an answer a deadline; there are at most `requests` under way, more are told when
  to come back.
- A client that is gone has its request cancelled, and its answer counts as undelivered: an answer was delivered if the
  connection stood until the last of it was handed to the system.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from typing import Any

from msgspec import Struct

from rollart.gateway.apis.base import Api, encode
from rollart.gateway.apis.chat import ChatCompletions
from rollart.gateway.apis.completions import Completions
from rollart.gateway.apis.generate import Generate
from rollart.gateway.apis.messages import CountTokens, Messages
from rollart.gateway.apis.responses import Responses
from rollart.gateway.errors import ApiError, busy
from rollart.gateway.template import ChatTemplate
from rollart.gateway.tenant import Served, Tenant
from rollart.gateway.tenants import Tenants

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = dict[bytes, bytes]
JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"

logger = logging.getLogger(__name__)


class Limits(Struct, frozen=True):
    """Seconds for a body to come, for an answer, and for a client to take a piece of it."""

    body_bytes: int = 32 << 20
    requests: int = 4096
    read_s: float = 30.0
    answer_s: float = 600.0
    send_s: float = 60.0


class Gone(Exception):
    """The client has left."""


class App:
    """`model` is the name that is offered; `any_model`: agents may ask for whatever name they were written for."""

    def __init__(
        self, template: ChatTemplate, tenants: Tenants, limits: Limits, model: str, any_model: bool = True
    ) -> None:
        self._tenants, self._limits, self._model, self._any_model = tenants, limits, model, any_model
        chat, messages, count = ChatCompletions(template), Messages(), CountTokens()
        self._chat, self._messages, self._count = chat, messages, count
        self._apis: dict[str, Api] = {
            "/chat/completions": chat,
            "/completions": Completions(template),
            "/responses": Responses(template),
            "/messages": messages,
            "/messages/count_tokens": count,
            "/inference/v1/generate": Generate(template),
        }
        self._open = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers: Headers = dict(scope["headers"])
        key, path = _key(scope["path"], headers)
        api = self._apis.get(path)
        shape = api or (self._messages if b"anthropic-version" in headers else self._chat)
        try:
            await self._answer(scope["method"], path, api, self._tenant(key, path), headers, receive, send)
        except ApiError as error:
            more = [(b"retry-after", b"%d" % error.retry_after)] if error.retry_after else []
            await _send_json(send, error.status, shape.error(error), more)
        except Gone:
            pass
        except Exception:  # the boundary: one request that fails must not end the others
            logger.exception("a request to %s failed", path)
            failed = ApiError(500, "the gateway failed at this request; its log has the reason", code="internal_error")
            await _send_json(send, 500, shape.error(failed))

    def _tenant(self, key: str | None, path: str) -> Tenant | None:
        if path == "/health":
            return None
        tenant = self._tenants.find(key) if key else None
        if tenant is None:
            said = "this key is not known, or its episode is over" if key else "show a key: Authorization: Bearer ..."
            raise ApiError(401, said, code="invalid_api_key")
        return tenant

    async def _answer(
        self,
        method: str,
        path: str,
        api: Api | None,
        tenant: Tenant | None,
        headers: Headers,
        receive: Receive,
        send: Send,
    ) -> None:
        if tenant is None:
            await _send_json(send, 200, {"ok": True})
        elif api is not None and method == "POST":
            if self._open >= self._limits.requests:
                raise busy(f"{self._open} requests are under way, as many as the gateway takes")
            self._open += 1
            try:
                await self._serve(api, tenant, headers, receive, send)
            finally:
                self._open -= 1
        elif api is not None:
            raise ApiError(405, f"{path} takes POST, not {method}", code="method_not_allowed")
        elif path == "/models" or path == f"/models/{self._model}":
            await _send_json(send, 200, self._models(listed=path == "/models"))
        else:
            raise ApiError(404, f"there is nothing at {path}", code="not_found")

    def _models(self, listed: bool) -> Any:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "rollart"}
        return {"object": "list", "data": [model]} if listed else model

    async def _serve(self, api: Api, tenant: Tenant, headers: Headers, receive: Receive, send: Send) -> None:
        ask = api.parse(await self._body(headers, receive), tenant)
        if not self._any_model and ask.model not in ("", self._model):
            raise ApiError(
                404,
                f"there is no model {ask.model!r} here, only {self._model!r}",
                param="model",
                code="model_not_found",
            )
        ask.model = ask.model or self._model
        if api is self._count:
            await _send_json(send, 200, {"input_tokens": tenant.count_tokens(ask)})
            return
        watch = asyncio.ensure_future(_left(receive))
        try:
            served = await self._served(asyncio.ensure_future(tenant.serve(ask)), watch)
            try:
                await self._deliver(api, served, watch, send)
            except BaseException:
                tenant.lost(served)
                raise
            tenant.delivered(served)
            api.served(ask, served.answer, tenant)
        finally:
            watch.cancel()

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        most = self._limits.body_bytes
        large = ApiError(413, f"the body is larger than {most:,} bytes", code="request_too_large")
        if int(headers.get(b"content-length", b"0")) > most:
            raise large
        pieces, size = [], 0
        try:
            async with asyncio.timeout(self._limits.read_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > most:
                        raise large
                    if not message.get("more_body"):
                        return b"".join(pieces)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self._limits.read_s:g} s") from None

    async def _served(self, work: "asyncio.Task[Served]", watch: "asyncio.Task[None]") -> Served:
        """The answer, unless the client leaves or the deadline passes first."""
        try:
            await asyncio.wait((work, watch), timeout=self._limits.answer_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if watch.done():
                raise Gone
            raise ApiError(504, f"there was no answer within {self._limits.answer_s:g} s", code="deadline_exceeded")
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))

    async def _deliver(self, api: Api, served: Served, watch: "asyncio.Task[None]", send: Send) -> None:
        ask, answer = served.ask, served.answer
        pieces: Iterable[bytes] = api.stream(ask, answer) if ask.stream else [encode(api.whole(ask, answer))]
        size = [] if ask.stream else [(b"content-length", b"%d" % len(pieces[0]))]  # type: ignore[index]
        kind = EVENTS if ask.stream else JSON
        head = [(b"content-type", kind), (b"x-request-id", answer.id.encode()), *size]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for piece, more in _with_end(pieces):
            if watch.done():
                raise Gone
            try:
                async with asyncio.timeout(self._limits.send_s):
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
            except TimeoutError:
                raise Gone from None


def _key(path: str, headers: Headers) -> tuple[str | None, str]:
    """The key, from the path or a header, and the path without it and without `/v1`."""
    key: str | None = None
    if path.startswith("/k/"):
        key, _, path = path[3:].partition("/")
        path = f"/{path}"
    else:
        bearer = headers.get(b"authorization", b"").decode("latin-1")
        if bearer[:7].lower() == "bearer ":
            key = bearer[7:].strip()
        for name in (b"x-api-key", b"api-key"):
            if name in headers and not key:
                key = headers[name].decode("latin-1").strip()
    while path.startswith("/v1/"):
        path = path[3:]
    return key, path.rstrip("/")


def _with_end(pieces: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Each with whether more follows."""
    last: bytes | None = None
    for piece in pieces:
        if last is not None:
            yield last, True
        last = piece
    yield last or b"", False


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_json(send: Send, status: int, value: Any, more: Iterable[tuple[bytes, bytes]] = ()) -> None:
    body = encode(value)
    head = [(b"content-type", JSON), (b"content-length", b"%d" % len(body)), *more]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
