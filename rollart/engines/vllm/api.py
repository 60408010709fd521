"""vLLM's HTTP API, as far as it is used here, over connections that stay open.

An error of vLLM raises EngineFailed with its message. So does a server that is gone, but only after `grace`: meanwhile
the process that watches the server ends, so all callers learn at once that more is lost than their request. Every call
but a generation has its own deadline; cancelling a generation closes its connection, which aborts it at the server.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from rollart.core.errors import EngineFailed
from rollart.engines.vllm.response import GenerateResponse

GENERATE = "/inference/v1/generate"
UNIX = "unix:"
SHORT_S = 30.0
SWAP_S = 600.0


_LINE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|generation_tokens_total|prompt_tokens_total|"
    r"prefix_cache_hits_total|external_prefix_cache_hits_total)\{[^}]*\} (\S+)$",
    re.MULTILINE,
)
_TOKENS = re.compile(r'^vllm:cache_config_info\{.*\bkv_cache_size_tokens="(\d+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class VllmMetrics:
    """`/metrics`, in the text format of Prometheus. `kv_use` is the share of KV memory in use by running requests,
    `kv_tokens` the capacity, 0 if unknown. Tokens count from the server's start: those of prompts, and how many of
    these were in its own cache or `fetched` from another server."""

    running: int
    waiting: int
    kv_use: float
    kv_tokens: int
    generated: int
    prompted: int
    cached: int
    fetched: int

    @property
    def prefilled(self) -> int:
        return self.prompted - self.cached - self.fetched


def parse_metrics(text: str) -> VllmMetrics:
    """Sums over the server's engines; of `kv_use` the maximum."""
    values: dict[str, list[float]] = {}
    for name, value in _LINE.findall(text):
        values.setdefault(name, []).append(float(value))

    def total(name: str) -> int:
        return int(sum(values.get(name, ())))

    return VllmMetrics(
        running=total("num_requests_running"),
        waiting=total("num_requests_waiting"),
        kv_use=max(values.get("kv_cache_usage_perc", (0.0,))),
        kv_tokens=sum(map(int, _TOKENS.findall(text))),
        generated=total("generation_tokens_total"),
        prompted=total("prompt_tokens_total"),
        cached=total("prefix_cache_hits_total"),
        fetched=total("external_prefix_cache_hits_total"),
    )


_decode = msgspec.json.Decoder(GenerateResponse).decode
_encode = msgspec.json.Encoder().encode


class VllmApi:
    """`url` is that of a server, or `unix:` and the path of its socket; a lost connection is reported after `grace`
    seconds. Use as an async context manager."""

    def __init__(self, url: str, *, key: str | None = None, grace: float = 0.0) -> None:
        self.url, self._grace = url, grace
        unix = url.startswith(UNIX)
        self._base = "http://vllm" if unix else url.rstrip("/")
        connector = (
            aiohttp.UnixConnector(url.removeprefix(UNIX), limit=0) if unix else aiohttp.TCPConnector(limit=0)
        )  # as many connections as there are requests
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._session = aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20
        )

    async def __aenter__(self) -> "VllmApi":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[GenerateResponse, None]:
        """The chunks of a response, as they come."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._response("POST", GENERATE, body) as response:
            async for line in _lines(response.content):
                if line.startswith(b"data: {"):
                    chunk = _decode(line[6:])
                    if chunk.error is not None:
                        raise EngineFailed(f"vLLM failed: {chunk.error.message}")
                    yield chunk

    async def generate(self, body: Mapping[str, Any]) -> GenerateResponse:
        async with self._response("POST", GENERATE, body) as response:
            return _decode(await response.read())

    async def abort(self, ids: list[str]) -> None:
        await self.post("/inference/v1/abort_requests", {"request_ids": ids})

    async def healthy(self, deadline: float = SHORT_S) -> bool:
        try:
            async with asyncio.timeout(deadline), self._response("GET", "/health") as response:
                return response.status == 200
        except (EngineFailed, TimeoutError):
            return False

    async def metrics(self) -> VllmMetrics:
        async with self._deadline("/metrics", SHORT_S), self._response("GET", "/metrics") as response:
            return parse_metrics(await response.text())

    async def workers(self, method: str, **arguments: Any) -> None:
        """Calls a method of every worker, between two steps."""
        await self.post("/collective_rpc", {"method": method, "kwargs": arguments}, deadline=SWAP_S)

    async def post(self, path: str, body: Any = None, *, deadline: float = SHORT_S) -> None:
        async with self._deadline(path, deadline), self._response("POST", path, body) as response:
            await response.read()

    @asynccontextmanager
    async def _deadline(self, path: str, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise EngineFailed(f"vLLM did not answer {path} within {seconds:g} s") from None

    @asynccontextmanager
    async def _response(self, method: str, path: str, body: Any = None) -> AsyncIterator[aiohttp.ClientResponse]:
        data = None if body is None else _encode(body)
        try:
            async with await self._sent(method, path, data) as response:
                if response.status >= 300:
                    raise EngineFailed(f"vLLM refused {path}: {_message(await response.read(), response.status)}")
                yield response
        except aiohttp.ClientError as error:
            await asyncio.sleep(self._grace)
            raise EngineFailed(f"the vLLM server at {self.url} is gone: {error}") from error
        except msgspec.MsgspecError as error:
            raise EngineFailed(f"vLLM's response to {path} is not understood: {error}") from error

    async def _sent(self, method: str, path: str, data: bytes | None) -> aiohttp.ClientResponse:
        """Retries once: a server may close an idle connection just as it is used again."""
        for last in (False, True):
            try:
                return await self._session.request(method, self._base + path, data=data, allow_redirects=False)
            except aiohttp.ServerDisconnectedError:
                if last:
                    raise
        raise AssertionError("unreachable")


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Of any length: aiohttp's own lines have a limit, which the expert choices of a long context exceed."""
    parts: list[bytes] = []
    async for data in content.iter_any():
        head, *lines = data.split(b"\n")
        parts.append(head)
        for line in lines:
            yield b"".join(parts)
            parts = [line]
    if any(parts):
        yield b"".join(parts)


def _message(body: bytes, status: int) -> str:
    """vLLM's errors are `{"error": {"message": ...}}`, those of its web framework `{"detail": ...}`."""
    try:
        reply = msgspec.json.decode(body)
        error = reply.get("error", reply.get("detail", reply))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (msgspec.MsgspecError, AttributeError):
        return f"status {status}: {body[:200].decode(errors='replace')}"
