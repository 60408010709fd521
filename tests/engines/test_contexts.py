import asyncio
from collections.abc import Callable
from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from served_engines import served
from tiny_decoders import decoder, request, twin, worst

from rollart.config import EngineConfig
from rollart.core.types import Completion, GenerationRequest, Sampling
from rollart.engines.client import EngineClient
from rollart.engines.contexts import Extended, KeptContexts, SentContexts, StreamRequest
from rollart.engines.torch.engine import TorchEngine
from rollart.engines.torch.model import EngineModel
from rollart.launch import rpc
from rollart.launch.rpc import Stream


def asked(conversation: int, tokens: list[int]) -> GenerationRequest:
    return GenerationRequest("id", "session", "task", 0, tokens, Sampling(), conversation=conversation)


class Engine:
    """Remembers what it was asked, and how many tokens were sent for it."""

    def __init__(self, limit: int) -> None:
        self.seen: list[list[int]] = []
        self.sent = 0
        self._contexts = KeptContexts(self._stream, limit)

    async def _stream(self, streamed: StreamRequest, on_part: Stream) -> Completion:
        self.seen.append(streamed.request.tokens)
        return Completion([1], [0.0], [0], "stop")

    async def receive(self, kind: str, sent: StreamRequest) -> Extended | Completion:
        self.sent += len(sent.request.tokens)
        arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=StreamRequest)
        handler: Callable[..., object] = getattr(self._contexts, kind)
        return await handler(arrived, lambda item: None)  # type: ignore[misc, no-any-return]


async def send(engine: Engine, client: SentContexts, request: GenerationRequest) -> None:
    """As `EngineClient` does."""
    short = client.shortened(request, 32)
    if short.known:
        extended = await engine.receive("extend", short)
        assert isinstance(extended, Extended)
        if extended.completion is not None:
            return
    await engine.receive("stream", client.whole(request, 32))


turns = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3), st.lists(st.integers(0, 200_000), min_size=1, max_size=6)),
    max_size=30,
)


@given(turns, st.integers(0, 60))
def test_an_engine_always_sees_the_whole_context(said: list[tuple[int, int, list[int]]], limit: int) -> None:
    """Two clients, three conversations each and requests that belong to none, however little the engine may keep."""

    async def body() -> None:
        engine, clients = Engine(limit), [SentContexts(), SentContexts()]
        contexts: dict[tuple[int, int], list[int]] = {}
        for client, conversation, tokens in said:
            context = contexts.setdefault((client, conversation), [])
            context += tokens
            await send(engine, clients[client], asked(conversation, context))
            assert engine.seen[-1] == context

    asyncio.run(body())


def test_only_new_tokens_are_sent() -> None:
    async def body() -> None:
        engine, client, context = Engine(1 << 20), SentContexts(), list(range(10_000))
        for _ in range(5):
            await send(engine, client, asked(1, context))
            context += range(100)
        assert engine.sent == 10_000 + 4 * 100
        assert list(map(len, engine.seen)) == [10_000, 10_100, 10_200, 10_300, 10_400]

    asyncio.run(body())


def test_a_conversation_that_goes_on_elsewhere_for_a_while_is_completed_on_its_return() -> None:
    async def body() -> None:
        here, elsewhere = Engine(1 << 20), Engine(1 << 20)
        ours, theirs, context = SentContexts(), SentContexts(), [1, 2, 3]
        for engine, client in ((here, ours), (elsewhere, theirs), (elsewhere, theirs), (here, ours)):
            await send(engine, client, asked(7, context))
            assert engine.seen[-1] == context
            context += [4, 5]

    asyncio.run(body())


def test_a_real_engine_answers_to_what_was_sent_in_pieces() -> None:
    """Over a socket; it keeps 60 tokens, so the context of the last turn has been forgotten."""
    network, lengths = decoder(seed=1), list[int]()

    async def body() -> None:
        async with TorchEngine(EngineModel(twin(network)), EngineConfig(prefill_chunk=16)) as engine:
            contexts = KeptContexts(engine.stream, 60)

            async def extend(streamed: StreamRequest, on_part: Stream) -> Extended:
                lengths.append(len(streamed.request.tokens))
                return await contexts.extend(streamed, on_part)

            async with (
                served({"stream": contexts.stream, "extend": extend}) as url,
                rpc.connected(url) as connection,
            ):
                client, context = EngineClient(connection), [3] * 20
                for turn in range(4):
                    asked = replace(request(f"turn {turn}", list(context), max_tokens=6), conversation=1)
                    completion = await client.generate_in_parts(asked, 2, lambda part: False)
                    assert completion.prompt == len(context)
                    assert worst({0: network}, asked, completion) <= 1e-4
                    context += [*completion.tokens, *range(12)]

    asyncio.run(body())
    assert lengths == [18, 18, 18]
