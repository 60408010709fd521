"""KV goes from one engine to another over real sockets; what comes out must be what one engine alone would say."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from plain_weights import at, versions
from served_engines import peer, served
from tiny_decoders import VOCABULARY, decoder, request, twin, worst

from rollart.config import EngineConfig
from rollart.core.errors import EngineFailed
from rollart.core.types import Completion, GenerationRequest
from rollart.engines.torch import kv_transfer
from rollart.engines.torch.engine import TorchEngine
from rollart.engines.torch.kv_transfer import KVPart, KVRangeRequest, KVRequest
from rollart.engines.torch.model import EngineModel
from rollart.launch import rpc

DEADLINE_S = 60.0
PROMPT = [(7 * index) % VOCABULARY for index in range(60)]


def drive(scenario: Callable[[], Awaitable[None]]) -> None:
    async def body() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(body())


def plain(asked: GenerationRequest) -> GenerationRequest:
    return replace(asked, kv_from=None)


async def alone(network: Any, asked: GenerationRequest) -> Completion:
    async with TorchEngine(EngineModel(twin(network)), EngineConfig()) as engine:
        return await engine.generate(plain(asked))


async def same(network: Any, asked: GenerationRequest, got: Completion) -> None:
    expected = await alone(network, asked)
    assert got.tokens == expected.tokens
    assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert worst(dict.fromkeys(got.versions, network), asked, got) <= 1e-4


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe"])
def test_a_conversation_prefilled_here_and_decoded_there_is_the_same_and_moves_only_what_is_new(
    architecture: str,
) -> None:
    network = decoder(architecture)

    async def scenario() -> None:
        async with peer(network) as (a, url), peer(network) as (b, _):
            context, had_a, had_b = PROMPT, 0, 0
            for turn in range(3):
                asked = replace(request(f"{turn}", context, "s", max_tokens=12, seed=turn), kv_from=url)
                most = len(context) - 1
                # Of its own, A has all but the last action and what follows it, B all but what follows.
                assert await a.prefill(plain(asked)) == most - had_a
                done = await b.generate(asked)
                assert (done.cached, done.fetched) == (most, most - had_b)
                await same(network, asked, done)
                had_a, had_b = most, len(context) + len(done.tokens) - 1
                context = [*context, *done.tokens, turn, turn + 1, turn + 2]

    drive(scenario)


def test_a_conversation_moves_from_one_engine_to_another_and_back() -> None:
    network = decoder()

    async def scenario() -> None:
        async with peer(network) as (a, at_a), peer(network) as (b, at_b):
            first = await a.generate(request("1", PROMPT, "s", max_tokens=10, seed=1))
            there = replace(request("2", [*PROMPT, *first.tokens, 1, 2], "s", max_tokens=10, seed=2), kv_from=at_a)
            second = await b.generate(there)
            assert second.fetched == second.cached == len(PROMPT) + 9
            await same(network, there, second)
            back = replace(request("3", [*there.tokens, *second.tokens, 3], "s", max_tokens=10, seed=3), kv_from=at_b)
            third = await a.generate(back)
            assert third.fetched == third.cached - (len(PROMPT) + 9) > 0
            await same(network, back, third)

    drive(scenario)


def test_many_small_parts_and_another_sessions_beginning_make_the_same_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    network = decoder()
    monkeypatch.setattr(kv_transfer, "PART_BYTES", 7 * EngineModel(twin(network)).layout.token_bytes)

    async def scenario() -> None:
        async with peer(network) as (a, url), peer(network) as (b, _):
            await b.generate(request("other", PROMPT[:40], max_tokens=1))
            asked = replace(request("1", PROMPT, max_tokens=10, seed=1), kv_from=url)
            await a.prefill(plain(asked))
            done = await b.generate(asked)
            assert (done.cached, done.fetched) == (59, 19)
            await same(network, asked, done)

    drive(scenario)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_bfloat16_kv_arrives_bit_for_bit() -> None:
    network = decoder().to(torch.bfloat16)

    async def scenario() -> None:
        async with peer(network) as (a, url), peer(network) as (b, _):
            asked = replace(request("1", PROMPT, max_tokens=1), kv_from=url)
            await a.prefill(plain(asked))
            assert (await b.generate(asked)).fetched == 59
            sent, length, _ = a._stepper.kv_cache.find("1", PROMPT[:59], ())
            kept, _, _ = b._stepper.kv_cache.find("1", PROMPT, ())
            assert sent is not None and kept is not None and length == 59
            assert torch.equal(kept.kv[:, :, :59], sent.kv) and kept.kv.dtype == torch.bfloat16

    # Some virtual machines announce bfloat16 instructions that they do not allow.
    with torch.backends.mkldnn.flags(enabled=False):
        drive(scenario)


def test_kv_that_was_evicted_is_computed_again() -> None:
    network = decoder()

    async def scenario() -> None:
        async with peer(network, kv_megabytes=1) as (a, url), peer(network) as (b, _):
            asked = replace(request("1", PROMPT, max_tokens=10, seed=1), kv_from=url)
            await a.prefill(plain(asked))
            for number in range(20):
                await a.generate(request(f"other {number}", [number] * 300, max_tokens=2))
            assert a._stepper.kv_cache.evicted > 0
            done = await b.generate(asked)
            assert (done.cached, done.fetched) == (0, 0)
            await same(network, asked, done)

    drive(scenario)


def test_kv_that_is_evicted_while_it_is_fetched_is_used_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    network = decoder()
    monkeypatch.setattr(kv_transfer, "PART_BYTES", 10 * EngineModel(twin(network)).layout.token_bytes)

    async def scenario() -> None:
        async with peer(network) as (a, _), peer(network) as (b, _):

            async def offer(wanted: KVRequest) -> KVPart:
                part = await a.kv_server.offer(wanted)
                a._stepper.kv_cache.clear()
                return part

            async with served({"offer": offer, "more": a.kv_server.more}) as url:
                asked = replace(request("1", PROMPT, max_tokens=10, seed=1), kv_from=url)
                await a.prefill(plain(asked))
                done = await b.generate(asked)
                assert (done.cached, done.fetched) == (10, 10)
                await same(network, asked, done)

    drive(scenario)


@pytest.mark.parametrize("swapped", ["a", "b", "b while fetching"])
def test_kv_of_other_weights_is_never_used(swapped: str) -> None:
    networks = decoder(seed=1), decoder(seed=2)
    store = versions(*networks)
    offered = []

    async def scenario() -> None:
        async with peer(networks[0], store) as (a, _), peer(networks[0], store) as (b, _):

            async def offer(wanted: KVRequest) -> KVPart:
                part = await a.kv_server.offer(wanted)
                offered.append(part.count)
                if swapped == "b while fetching":
                    await b.load(at(1))
                return part

            async with served({"offer": offer}) as url:
                asked = replace(request("1", PROMPT, max_tokens=10, seed=1), kv_from=url)
                await a.prefill(plain(asked))
                if swapped == "a":
                    await a.load(at(1))
                if swapped == "b":
                    await b.load(at(1))
                done = await b.generate(asked)
                now = 0 if swapped == "a" else 1
                assert offered == [59 if swapped == "b while fetching" else 0]
                assert (done.cached, done.fetched, set(done.versions)) == (0, 0, {now})
                await same(networks[now], asked, done)
                assert b._stepper.kv_cache._entries.keys() == {"1"}

    drive(scenario)


def test_engines_that_keep_kv_over_a_swap_still_hand_it_over() -> None:
    networks = decoder(seed=1), decoder(seed=2)
    store = versions(*networks)

    async def scenario() -> None:
        keeping = {"store": store, "on_swap": "keep"}
        async with peer(networks[0], **keeping) as (a, url), peer(networks[0], **keeping) as (b, _):
            asked = replace(request("1", PROMPT, max_tokens=2, seed=1), kv_from=url)
            await a.prefill(plain(asked))
            await a.load(at(1))
            await b.load(at(1))
            assert (await b.generate(asked)).fetched == 59

    drive(scenario)


def test_an_engine_that_is_not_there_says_nonsense_or_has_another_kind_of_kv_costs_nothing_but_the_prefill() -> None:
    network = decoder()

    async def misfit(wanted: KVRequest) -> KVPart:
        return KVPart(1, len(wanted.tokens), 0, 5, memoryview(b"too short"))

    async def nonsense(wanted: KVRequest) -> str:
        return "kv?"

    async def scenario() -> None:
        async with (
            peer(network) as (b, _),
            peer(decoder().double()) as (other, at_other),
            served({"offer": misfit}) as at_misfit,
            served({"offer": nonsense}) as at_nonsense,
            served({}) as at_nothing,
        ):
            asked = request("1", PROMPT, max_tokens=10, seed=1)
            await other.prefill(asked)
            with socket.create_server(("127.0.0.1", 0)) as closed:
                port = closed.getsockname()[1]
            for number, url in enumerate([at_other, at_misfit, at_nonsense, at_nothing, f"http://127.0.0.1:{port}"]):
                fresh = replace(asked, id=str(number), session=str(number), tokens=[number, *PROMPT], kv_from=url)
                done = await b.generate(fresh)
                assert (done.cached, done.fetched) == (0, 0)
                await same(network, fresh, done)

    drive(scenario)


def test_a_connection_is_kept_and_one_that_was_lost_is_made_again() -> None:
    network = decoder()
    fetched = []

    async def scenario() -> None:
        async with peer(network) as (a, _), peer(network) as (b, _):

            async def move(name: str, url: str) -> asyncio.Task[rpc.RpcClient] | None:
                asked = request(name, [int(name), *PROMPT], max_tokens=3)
                await a.prefill(asked)
                fetched.append((await b.generate(replace(asked, kv_from=url))).fetched)
                return b._fetcher._peers[url].connection

            handlers: dict[str, rpc.Handler] = {"offer": a.kv_server.offer, "more": a.kv_server.more}
            async with served(handlers) as url:
                first = await move("1", url)
                assert await move("2", url) is first
            await move("3", url)
            async with served(handlers, port=int(url.rpartition(":")[2])) as url:
                assert await move("4", url) is not first
            assert fetched == [60, 60, 0, 60]

    drive(scenario)


class Stalled:
    """An engine that takes the question and never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def offer(self, wanted: KVRequest) -> KVPart:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def more(self, wanted: KVRangeRequest) -> KVPart:
        raise AssertionError


def test_an_engine_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    network = decoder()
    monkeypatch.setattr(kv_transfer, "ANSWER_S", 0.2)

    async def scenario() -> None:
        async with peer(network) as (b, _), served({"offer": Stalled().offer}) as url:
            asked = replace(request("1", PROMPT, max_tokens=10, seed=1), kv_from=url)
            await same(network, asked, await b.generate(asked))

    drive(scenario)


def test_others_are_served_while_kv_is_fetched_and_what_is_fetched_for_counts_as_waiting() -> None:
    network = decoder()

    async def scenario() -> None:
        stalled = Stalled()
        async with peer(network) as (b, _), served({"offer": stalled.offer}) as url:
            asked = replace(request("1", PROMPT, max_tokens=10), kv_from=url)
            fetching = asyncio.create_task(b.generate(asked))
            await stalled.asked.wait()
            assert len((await b.generate(request("2", PROMPT, max_tokens=30))).tokens) == 30
            status = await b.status()
            assert (status.waiting, status.running) == (1, 0)
            assert status.kv_reserved == 70 * b._stepper.rows.layout.token_bytes
            with pytest.raises(EngineFailed, match="already in flight"):
                await b.generate(asked)
            await b.abort("1")
            done = await fetching
            assert (done.finish, done.tokens) == ("abort", [])
            assert (await b.status()).kv_reserved == 0

    drive(scenario)


def test_a_caller_who_gives_up_during_the_fetch_leaves_nothing_behind() -> None:
    network = decoder()

    async def scenario() -> None:
        stalled = Stalled()
        async with peer(network) as (b, _), served({"offer": stalled.offer}) as url:
            asked = replace(request("1", PROMPT, max_tokens=10), kv_from=url)
            fetching = asyncio.create_task(b.generate(asked))
            await stalled.asked.wait()
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            status = await b.status()
            assert (status.waiting, status.running, status.generated) == (0, 0, 0)

    drive(scenario)


def test_closing_ends_a_fetch_at_once() -> None:
    network = decoder()

    async def scenario() -> None:
        stalled = Stalled()
        async with served({"offer": stalled.offer}) as url:
            async with peer(network) as (b, _):
                fetching = asyncio.create_task(b.generate(replace(request("1", PROMPT), kv_from=url)))
                await stalled.asked.wait()
            with pytest.raises(EngineFailed, match="closed"):
                await fetching

    drive(scenario)


def test_the_kv_of_a_group_is_prefilled_once_and_fetched_once() -> None:
    network = decoder()

    async def scenario() -> None:
        async with peer(network) as (a, url), peer(network, max_batch=4) as (b, _):
            group = [
                replace(request(str(member), PROMPT, max_tokens=10, seed=member), kv_from=url) for member in range(10)
            ]
            assert sum(await asyncio.gather(*map(a.prefill, map(plain, group)))) <= len(PROMPT) + 10
            done = await asyncio.gather(*map(b.generate, group))
            assert {one.cached for one in done} == {59}
            assert sorted(one.fetched for one in done) == [0] * 9 + [59]
            for asked, completion in zip(group, done, strict=True):
                await same(network, asked, completion)
            assert len(b._fetcher._peers) == 1 and not b._fetcher._first

    drive(scenario)
