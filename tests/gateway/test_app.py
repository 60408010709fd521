"""Keys, limits and clients that leave, over a real connection."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from gateways import KEY, Policy, Running, episode_limits, gateway
from wire import Wire, parsed

from rollart.core.errors import EngineFailed
from rollart.core.protocols import TokenStream
from rollart.core.types import Completion, GenerationRequest
from rollart.gateway.http import Connection, OpenConnections
from rollart.gateway.limits import GatewayLimits
from rollart.gateway.template import ChatTemplate

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hello"}]}


def with_session(
    template: ChatTemplate,
    test: Callable[[aiohttp.ClientSession, Running], Awaitable[None]],
    limits: GatewayLimits | None = None,
    policy: Policy | None = None,
) -> None:
    async def run() -> None:
        async with (
            gateway(template, policy, limits) as running,
            aiohttp.ClientSession(running.url, timeout=aiohttp.ClientTimeout(20)) as session,
        ):
            await test(session, running)

    asyncio.run(run())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (CHAT, bearer(KEY)),
        (CHAT, {"x-api-key": KEY}),
        (f"/k/{KEY}{CHAT}", {}),
        (f"/k/{KEY}/chat/completions", {}),
    ],
)
def test_a_key_may_be_in_a_header_or_in_the_url(tiny: ChatTemplate, path: str, headers: dict[str, str]) -> None:
    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        async with session.post(path, json=ASK, headers=headers) as response:
            assert response.status == 200

    with_session(tiny, test)


def test_without_a_valid_key_only_health_works(tiny: ChatTemplate) -> None:
    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        running.sessions.open("old", episode_limits("old"))
        running.sessions.close("old")
        for path in (CHAT, "/v1/models", "/v1/messages", "/k//v1/models", "/k/old/v1/models", "/nowhere"):
            for headers in ({}, bearer("old"), {"x-api-key": "guess"}):
                async with session.post(path, json=ASK, headers=headers) as response:
                    assert response.status == 401, path
        async with session.get("/health") as response:
            assert response.status == 200
        assert not running.policy.seen

    with_session(tiny, test)


def test_keys_are_never_logged(tiny: ChatTemplate, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    class Broken(Policy):
        async def generate(self, request: GenerationRequest, stream: TokenStream | None = None, /) -> Completion:
            raise ValueError("a bug")

    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        async with session.post(f"/k/{KEY}{CHAT}", json=ASK) as response:
            assert response.status == 500
            assert (await response.json())["error"]["type"] == "server_error"
        async with session.post(CHAT, json=ASK, headers=bearer(KEY)) as response:
            assert response.status == 500

    with caplog.at_level(logging.DEBUG):
        with_session(tiny, test, policy=Broken(tiny))
    out, err = capfd.readouterr()
    assert "a bug" in caplog.text
    assert KEY not in caplog.text + out + err


def test_a_body_beyond_the_limit_is_refused_with_or_without_its_length(tiny: ChatTemplate) -> None:
    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        async with session.post(CHAT, data=b" " * 2000, headers=bearer(KEY)) as response:
            assert response.status == 413

        async def pieces() -> Any:
            for _ in range(20):
                yield b" " * 100

        async with session.post("/v1/messages", data=pieces(), headers=bearer(KEY)) as response:
            assert response.status == 413
            assert (await response.json())["error"]["type"] == "request_too_large"

    with_session(tiny, test, GatewayLimits(body_bytes=1000))


def test_a_gateway_at_its_limit_sends_retry_after(tiny: ChatTemplate) -> None:
    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        running.policy.gate = asyncio.Event()
        first = asyncio.create_task(_status(session))
        await running.policy.begun.wait()
        async with session.post(CHAT, json=ASK, headers=bearer(KEY)) as response:
            assert (response.status, response.headers["retry-after"]) == (429, "1")
        running.policy.gate.set()
        assert await first == 200

    with_session(tiny, test, GatewayLimits(requests=1))


def test_an_answer_that_takes_too_long_is_cancelled(tiny: ChatTemplate) -> None:
    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        running.policy.gate = asyncio.Event()
        assert await _status(session) == 504
        assert running.policy.cancelled == 1

    with_session(tiny, test, GatewayLimits(response_s=0.05))


def test_engines_that_fail_are_a_503_worth_trying_again(tiny: ChatTemplate) -> None:
    class Failing(Policy):
        async def generate(self, request: GenerationRequest, stream: TokenStream | None = None, /) -> Completion:
            raise EngineFailed("none is left")

    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        async with session.post("/v1/messages", json={**ASK, "max_tokens": 5}, headers=bearer(KEY)) as response:
            assert response.status == 503
            assert response.headers["retry-after"] == "1"
            assert (await response.json())["error"]["type"] == "overloaded_error"

    with_session(tiny, test, policy=Failing(tiny))


def test_a_client_that_disconnects_has_its_request_cancelled_and_nothing_is_kept(tiny: ChatTemplate) -> None:
    class Told(Policy):
        ended = asyncio.Event()

        async def generate(self, request: GenerationRequest, stream: TokenStream | None = None, /) -> Completion:
            try:
                return await super().generate(request, stream)
            finally:
                self.ended.set()

    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        running.policy.gate = asyncio.Event()
        asked = asyncio.create_task(_status(session))
        await running.policy.begun.wait()
        asked.cancel()
        assert isinstance(running.policy, Told)
        async with asyncio.timeout(10):
            await running.policy.ended.wait()
        assert running.policy.cancelled == 1
        assert running.sessions.close(KEY).turns == ()

    with_session(tiny, test, policy=Told(tiny))


def test_a_client_that_disconnects_in_mid_stream_has_the_generation_cancelled(tiny: ChatTemplate) -> None:
    class Told(Policy):
        left = asyncio.Event()

        async def generate(self, request: GenerationRequest, stream: TokenStream | None = None, /) -> Completion:
            try:
                return await super().generate(request, stream)
            except asyncio.CancelledError:
                self.left.set()
                raise

    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        assert isinstance(running.policy, Told)
        running.policy.pause = asyncio.Event()
        async with session.post(CHAT, json={**ASK, "stream": True}, headers=bearer(KEY)) as response:
            assert (await response.content.readline()).startswith(b"data: {")
        async with asyncio.timeout(10):
            await running.policy.left.wait()
        assert not running.policy.seen
        assert running.sessions.close(KEY).turns == ()

    with_session(tiny, test, policy=Told(tiny))


def test_a_client_that_reads_slowly_gets_what_it_missed_in_one_piece(tiny: ChatTemplate) -> None:
    async def test(wire: Wire, policy: Policy) -> None:
        body = json.dumps({**ASK, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
        wire.connection.pause_writing()
        wire.send(head.encode() + body)
        await policy.answered.wait()
        wire.connection.resume_writing()
        assert wire.connection.task is not None
        await asyncio.wait([wire.connection.task])
        _, _, events = parsed(wire.received)
        deltas = [json.loads(line[6:]) for line in events.decode().splitlines() if line.startswith("data: {")]
        assert [each["choices"][0]["delta"].get("content") for each in deltas] == ["", "a long answer", None]

    async def run() -> None:
        policy = Policy(tiny, say=lambda request: "a long answer")
        async with gateway(tiny, policy) as running:
            await test(Wire(Connection(running.app, OpenConnections())), policy)

    asyncio.run(run())


def test_revoking_a_key_cancels_its_requests(tiny: ChatTemplate) -> None:
    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        running.policy.gate = asyncio.Event()
        asked = asyncio.create_task(_status(session))
        await running.policy.begun.wait()
        assert running.sessions.close(KEY).turns == ()
        assert await asked == 401
        assert running.policy.cancelled == 1

    with_session(tiny, test)


def test_an_episode_gets_no_more_completions_than_its_limit(tiny: ChatTemplate) -> None:
    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        running.sessions.open("two", episode_limits("two", max_calls=2))
        answers = [await _status(session, "two") for _ in range(3)]
        assert answers == [200, 200, 400]
        captured = running.sessions.close("two")
        assert captured.truncated and len(captured.turns) == 2

    with_session(tiny, test)


def test_a_key_without_a_limit_of_completions_serves_for_ever(tiny: ChatTemplate) -> None:
    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        running.sessions.open("served", episode_limits("served"))
        served = running.sessions.find("served")
        assert served is not None
        served._used = 10_000_000
        assert await _status(session, "served") == 200

    with_session(tiny, test)


def test_two_episodes_with_the_same_words_share_nothing(tiny: ChatTemplate) -> None:
    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        running.sessions.open("other", episode_limits("other"))
        await asyncio.gather(_status(session), _status(session, "other"))
        mine, other = running.sessions.close(KEY), running.sessions.close("other")
        assert len(mine.turns) == len(other.turns) == 1
        sessions = {request.session for request, _ in running.policy.seen}
        assert sessions == {"episode~0", "other~0"}

    with_session(tiny, test)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": 3}', b'{"messages": []}', b"\xff", b"[" * 100_000])
def test_an_unreadable_request_is_a_400(tiny: ChatTemplate, body: bytes) -> None:
    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        for path in (CHAT, "/v1/messages", "/v1/responses", "/v1/completions", "/inference/v1/generate"):
            async with session.post(path, data=body, headers=bearer(KEY)) as response:
                assert response.status == 400, await response.text()

    with_session(tiny, test)


def test_tokens_in_tokens_out(tiny: ChatTemplate) -> None:
    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        body = {"token_ids": [10, 11, 12], "sampling_params": {"max_tokens": 9, "logprobs": 1}}
        async with session.post("/inference/v1/generate", json=body, headers=bearer(KEY)) as response:
            choice = (await response.json())["choices"][0]
        async with session.post(
            "/inference/v1/generate", json={**body, "token_ids": [10**6]}, headers=bearer(KEY)
        ) as no:
            assert (no.status, (await no.json())["error"]["param"]) == (400, "token_ids")
        request, completion = running.policy.seen[0]
        assert (request.tokens, choice["token_ids"]) == ([10, 11, 12], completion.tokens)
        assert [piece["logprob"] for piece in choice["logprobs"]["content"]] == completion.logprobs
        assert choice["logprobs"]["content"][0]["token"] == f"token_id:{completion.tokens[0]}"

    with_session(tiny, test)


async def _status(session: aiohttp.ClientSession, key: str = KEY) -> int:
    async with session.post(CHAT, json=ASK, headers=bearer(key)) as response:
        await response.read()
        return response.status


def test_a_text_far_beyond_the_context_is_refused_before_it_is_tokenized(tiny: ChatTemplate) -> None:
    async def test(session: aiohttp.ClientSession, running: Running) -> None:
        long = "word " * 1_000_000
        bodies = {
            CHAT: {"messages": [{"role": "user", "content": long}]},
            "/v1/completions": {"prompt": long},
            "/v1/responses": {"input": long},
        }
        for path, body in bodies.items():
            async with session.post(path, json=body, headers=bearer(KEY)) as response:
                assert response.status == 400
                assert (await response.json())["error"]["code"] == "context_length_exceeded"
        assert running.sessions.close(KEY).truncated

    with_session(tiny, test)
