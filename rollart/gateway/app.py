"""The gateway over HTTP: finds the API of a path and the session of a key, and delivers the response.

The invariants:
- Only `/health` works without a key, and a key sees its own session only. Keys are never logged or echoed.
- A response has a deadline; at most `requests` are under way, more get a 429 with Retry-After.
- When a client disconnects, its request is cancelled and the response counts as undelivered: a response is delivered
  if the connection stood until the last of it was handed to the operating system.
- A stream begins with the first text to send, so what fails before that still fails by its status.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rollart.gateway.apis.base import Api, encode, event
from rollart.gateway.apis.chat import ChatCompletions
from rollart.gateway.apis.completions import Completions
from rollart.gateway.apis.generate import Generate
from rollart.gateway.apis.messages import CountTokens, Messages
from rollart.gateway.apis.responses import Responses
from rollart.gateway.errors import ApiError, busy
from rollart.gateway.http import ClientGone, Exchange
from rollart.gateway.limits import GatewayLimits
from rollart.gateway.messages import CompletionRequest, CompletionResponse
from rollart.gateway.session import EpisodeSession, OnText, PendingResponse, SessionTable
from rollart.gateway.template import ChatTemplate

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"

logger = logging.getLogger(__name__)


class ApiRoute(NamedTuple):
    api: Api
    session: EpisodeSession


class App:
    """`model` is the name that is offered; `any_model`: requests may name any other model as well."""

    def __init__(
        self, template: ChatTemplate, sessions: SessionTable, limits: GatewayLimits, model: str, any_model: bool = True
    ) -> None:
        self.limits = limits
        self._sessions, self._model, self._any_model = sessions, model, any_model
        self._chat, self._messages, self._count = ChatCompletions(template), Messages(), CountTokens()
        self._apis: dict[str, Api] = {
            "/chat/completions": self._chat,
            "/completions": Completions(template),
            "/responses": Responses(template),
            "/messages": self._messages,
            "/messages/count_tokens": self._count,
            "/inference/v1/generate": Generate(template),
        }
        self._open = 0

    # Routing

    def route(self, exchange: Exchange) -> ApiRoute | dict[str, Any]:
        """The API and the session of the request, or the response if it needs neither. Raises ApiError."""
        key, path = _key(exchange.path, exchange.headers)
        if path == "/health":
            return {"ok": True}
        session = self._sessions.find(key) if key else None
        if session is None:
            reason = "this key is not known, or its episode is over" if key else "send a key: Authorization: Bearer ..."
            raise ApiError(401, reason, code="invalid_api_key")
        exchange.known = True
        if self._open >= self.limits.requests:  # before its body is read; counted again once it is
            raise busy(f"the gateway has its limit of {self._open} requests under way")
        api = self._apis.get(path)
        if api is None:
            return self._listing(path)
        if exchange.method != "POST":
            raise ApiError(405, f"{path} takes POST, not {exchange.method}", code="method_not_allowed")
        return ApiRoute(api, session)

    def _listing(self, path: str) -> dict[str, Any]:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "rollart"}
        if path == "/models":
            return {"object": "list", "data": [model]}
        if path != f"/models/{self._model}":
            raise ApiError(404, f"there is nothing at {path}", code="not_found")
        return model

    def refuse(self, exchange: Exchange, error: ApiError) -> None:
        _, path = _key(exchange.path, exchange.headers)
        anthropic = b"anthropic-version" in exchange.headers
        shape = self._apis.get(path) or (self._messages if anthropic else self._chat)
        if exchange.ended:
            return
        if exchange.begun:
            exchange.write(event(shape.error(error), "error"))
            exchange.end()
            return
        headers = [(b"retry-after", b"%d" % error.retry_after)] if error.retry_after else []
        _respond(exchange, error.status, shape.error(error), headers)

    # Responses

    async def handle(self, exchange: Exchange) -> None:
        route: ApiRoute | dict[str, Any] = exchange.route
        try:
            if isinstance(route, ApiRoute):
                await self._admit(route.api, route.session, exchange)
            else:
                _respond(exchange, 200, route)
        except ApiError as error:
            self.refuse(exchange, error)
        except ClientGone:
            pass
        except Exception as error:  # the boundary: one request that fails must not end the others
            logger.error("a request to %s failed", _key(exchange.path, exchange.headers)[1], exc_info=error)
            self.refuse(exchange, ApiError(500, "the gateway failed; its log has the reason", code="internal_error"))

    async def _admit(self, api: Api, session: EpisodeSession, exchange: Exchange) -> None:
        if self._open >= self.limits.requests:
            raise busy(f"the gateway has its limit of {self._open} requests under way")
        self._open += 1
        try:
            await self._serve(api, session, exchange)
        finally:
            self._open -= 1

    async def _serve(self, api: Api, session: EpisodeSession, exchange: Exchange) -> None:
        request = api.parse(exchange.body, session)
        if not self._any_model and request.model not in ("", self._model):
            reason = f"there is no model {request.model!r} here, only {self._model!r}"
            raise ApiError(404, reason, param="model", code="model_not_found")
        request.model = request.model or self._model
        if api is self._count:
            _respond(exchange, 200, {"input_tokens": session.count_tokens(request)})
        elif request.stream:
            await self._stream(api, request, session, exchange)
        else:
            pending = await self._generate(session, request)
            await self._deliver(
                api, session, pending, exchange, lambda: encode(api.response_body(request, pending.response))
            )

    async def _stream(self, api: Api, request: CompletionRequest, session: EpisodeSession, exchange: Exchange) -> None:
        writer = api.writer(request)

        def on_text(response: CompletionResponse, index: int, piece: str) -> bool:
            if not exchange.ready:
                return False
            _write(exchange, response, writer.text(response, index, piece))
            return True

        pending = await self._generate(session, request, on_text if api.streams_text else None)
        sent = [choice.sent for choice in pending.choices]
        await self._deliver(api, session, pending, exchange, lambda: writer.end(pending.response, sent))

    async def _generate(
        self, session: EpisodeSession, request: CompletionRequest, on_text: OnText | None = None
    ) -> PendingResponse:
        try:
            async with asyncio.timeout(self.limits.response_s):
                return await session.serve(request, on_text)
        except TimeoutError:
            reason = f"there was no answer within {self.limits.response_s:g} s"
            raise ApiError(504, reason, code="deadline_exceeded") from None

    async def _deliver(
        self, api: Api, session: EpisodeSession, pending: PendingResponse, exchange: Exchange, body: Callable[[], bytes]
    ) -> None:
        """`body` returns the whole response, or the end of a stream."""
        response = pending.response
        try:
            if pending.request.stream:
                _write(exchange, response, body())
                exchange.end()
            else:
                exchange.respond(200, JSON, body(), [(b"x-request-id", response.id.encode())])
            await exchange.drained()
        except BaseException:
            session.discard(pending)
            raise
        session.delivered(pending)
        api.on_delivered(pending.request, response, session)


def _write(exchange: Exchange, response: CompletionResponse, piece: bytes) -> None:
    if not exchange.begun:
        exchange.begin(EVENTS, [(b"x-request-id", response.id.encode()), (b"cache-control", b"no-cache")])
    exchange.write(piece)


def _respond(exchange: Exchange, status: int, value: Any, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    exchange.respond(status, JSON, encode(value), headers)


def _key(path: str, headers: dict[bytes, bytes]) -> tuple[str | None, str]:
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
