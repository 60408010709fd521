"""The gateway over HTTP: which API a path is, whose key it shows, and what becomes of the answer.

The invariants:
- Nothing but `/health` is answered without a key, and a key sees its own tenant only. Keys are never logged or echoed.
- An answer has a deadline; there are at most `requests` under way, more are told when to come back.
- A client that is gone has its request cancelled, and its answer counts as undelivered: an answer was delivered if the
  connection stood until the last of it was handed to the system.
- A stream begins with the first text that there is to show, so what fails before that still fails by its status.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rollart.gateway.apis.base import Api, Writer, encode, event
from rollart.gateway.apis.chat import ChatCompletions
from rollart.gateway.apis.completions import Completions
from rollart.gateway.apis.generate import Generate
from rollart.gateway.apis.messages import CountTokens, Messages
from rollart.gateway.apis.responses import Responses
from rollart.gateway.errors import ApiError, busy
from rollart.gateway.http import Exchange, Gone
from rollart.gateway.limits import GatewayLimits
from rollart.gateway.messages import CompletionRequest, CompletionResponse
from rollart.gateway.template import ChatTemplate
from rollart.gateway.tenant import Hear, Served, Tenant
from rollart.gateway.tenants import Tenants

Headers = dict[bytes, bytes]
JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes: to an API, or, without one, it gets what is `there`."""

    tenant: Tenant
    api: Api | None = None
    there: Any = None


class App:
    """`model` is the name that is offered; `any_model`: agents may ask for whatever name they were written for."""

    def __init__(
        self, template: ChatTemplate, tenants: Tenants, limits: GatewayLimits, model: str, any_model: bool = True
    ) -> None:
        self.limits = limits
        self._tenants, self._model, self._any_model = tenants, model, any_model
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

    # Whose request it is, and for what

    def route(self, request: Exchange) -> Route | None:
        """None: it asks for the gateway's health. Raises ApiError."""
        key, path = _key(request.path, request.headers)
        if path == "/health":
            return None
        tenant = self._tenants.find(key) if key else None
        if tenant is None:
            said = "this key is not known, or its episode is over" if key else "show a key: Authorization: Bearer ..."
            raise ApiError(401, said, code="invalid_api_key")
        api = self._apis.get(path)
        if api is None:
            return Route(tenant, there=self._listed(path))
        if request.method != "POST":
            raise ApiError(405, f"{path} takes POST, not {request.method}", code="method_not_allowed")
        return Route(tenant, api)

    def _listed(self, path: str) -> Any:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "rollart"}
        if path == "/models":
            return {"object": "list", "data": [model]}
        if path != f"/models/{self._model}":
            raise ApiError(404, f"there is nothing at {path}", code="not_found")
        return model

    def refuse(self, request: Exchange, error: ApiError) -> None:
        _, path = _key(request.path, request.headers)
        anthropic = b"anthropic-version" in request.headers
        shape = self._apis.get(path) or (self._messages if anthropic else self._chat)
        if request.ended:
            return
        if request.begun:
            request.write(event(shape.error(error), "error"))
            request.end()
            return
        more = [(b"retry-after", b"%d" % error.retry_after)] if error.retry_after else []
        _answer(request, error.status, shape.error(error), more)

    # The answer

    async def handle(self, request: Exchange) -> None:
        route: Route | None = request.route
        try:
            if route is None:
                _answer(request, 200, {"ok": True})
            elif route.api is None:
                _answer(request, 200, route.there)
            else:
                await self._admitted(route.api, route.tenant, request)
        except ApiError as error:
            self.refuse(request, error)
        except Gone:
            pass
        except Exception as error:  # the boundary: one request that fails must not end the others
            self.refuse(request, self._failed(request, error))

    def _failed(self, request: Exchange, error: Exception) -> ApiError:
        logger.error("a request to %s failed", _key(request.path, request.headers)[1], exc_info=error)
        return ApiError(500, "the gateway failed at this request; its log has the reason", code="internal_error")

    async def _admitted(self, api: Api, tenant: Tenant, request: Exchange) -> None:
        if self._open >= self.limits.requests:
            raise busy(f"{self._open} requests are under way, as many as the gateway takes")
        self._open += 1
        try:
            await self._serve(api, tenant, request)
        finally:
            self._open -= 1

    async def _serve(self, api: Api, tenant: Tenant, request: Exchange) -> None:
        ask = api.parse(request.body, tenant)
        if not self._any_model and ask.model not in ("", self._model):
            raise ApiError(
                404,
                f"there is no model {ask.model!r} here, only {self._model!r}",
                param="model",
                code="model_not_found",
            )
        ask.model = ask.model or self._model
        if api is self._count:
            _answer(request, 200, {"input_tokens": tenant.count_tokens(ask)})
        elif ask.stream:
            await self._stream(api, api.writer(ask), ask, tenant, request)
        else:
            served = await self._served(tenant, ask)
            await self._deliver(api, tenant, served, request, lambda: encode(api.whole(ask, served.answer)))

    async def _stream(
        self, api: Api, writer: Writer, ask: CompletionRequest, tenant: Tenant, request: Exchange
    ) -> None:
        def hear(answer: CompletionResponse, index: int, piece: str) -> bool:
            if not request.ready:
                return False
            _write(request, answer, writer.text(answer, index, piece))
            return True

        served = await self._served(tenant, ask, hear if api.speaks else None)
        shown = [draft.shown for draft in served.drafts]
        await self._deliver(api, tenant, served, request, lambda: writer.end(served.answer, shown))

    async def _served(self, tenant: Tenant, ask: CompletionRequest, hear: Hear | None = None) -> Served:
        try:
            async with asyncio.timeout(self.limits.answer_s):
                return await tenant.serve(ask, hear)
        except TimeoutError:
            raise ApiError(
                504, f"there was no answer within {self.limits.answer_s:g} s", code="deadline_exceeded"
            ) from None

    async def _deliver(
        self, api: Api, tenant: Tenant, served: Served, request: Exchange, last: Callable[[], bytes]
    ) -> None:
        """`last` gives all of the answer, or of a stream what it still lacks."""
        answer = served.answer
        try:
            if served.ask.stream:
                _write(request, answer, last())
                request.end()
            else:
                request.answer(200, JSON, last(), [(b"x-request-id", answer.id.encode())])
            await request.drained()
        except BaseException:
            tenant.lost(served)
            raise
        tenant.delivered(served)
        api.served(served.ask, answer, tenant)


def _write(request: Exchange, answer: CompletionResponse, piece: bytes) -> None:
    if not request.begun:
        request.begin(EVENTS, [(b"x-request-id", answer.id.encode()), (b"cache-control", b"no-cache")])
    request.write(piece)


def _answer(request: Exchange, status: int, value: Any, more: Iterable[tuple[bytes, bytes]] = ()) -> None:
    request.answer(status, JSON, encode(value), more)


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
