"""One real vLLM server, which all tests of this file use in turn; the last one kills what stands in front of it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import psutil
import pytest
from msgspec import structs
from vllm_fleet import DEADLINE_S, NEEDS_VLLM, Fronted, Versions, begun, fronted, request

from rollart.core.errors import EngineFailed
from rollart.core.types import Completion, GenerationRequest, TokenPart
from rollart.engines.client import EngineClient

T = TypeVar("T")
pytestmark = [pytest.mark.slow, NEEDS_VLLM, pytest.mark.timeout(1800)]


@dataclass
class Setup:
    runner: asyncio.Runner
    versions: Versions
    front: Fronted

    @property
    def engine(self) -> EngineClient:
        return self.front.engine

    def run(self, work: Awaitable[T]) -> T:
        return self.runner.run(asyncio.wait_for(work, DEADLINE_S))

    def generate(self, *asked: GenerationRequest) -> list[Completion]:
        async def all_of_them() -> list[Completion]:
            return await asyncio.gather(*map(self.engine.generate, asked))

        return self.run(all_of_them())

    def publish_and_load(self) -> int:
        """Another version than the one that is there."""
        version = max(self.versions.networks) + 1
        self.versions.publish(version)
        self.run(self.engine.load(self.versions.published(version)))
        return version


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("vllm")
    versions = Versions.made(folder)
    with asyncio.Runner() as runner:
        front = fronted(versions, folder)
        yield Setup(runner, versions, runner.run(front.__aenter__()))
        runner.run(front.__aexit__(None, None, None))


def prompts(number: int, length: int = 30, **sampling: object) -> list[GenerationRequest]:
    return [
        request(f"{length}-{index}", [5 + (index * 7 + at) % 90 for at in range(length)], seed=index, **sampling)
        for index in range(number)
    ]


def test_logprobs_are_those_of_a_plain_forward_pass_at_the_temperature_of_the_request(setup: Setup) -> None:
    asked = prompts(12, max_tokens=24, temperature=0.7)
    for one, made in zip(asked, setup.generate(*asked), strict=True):
        assert setup.versions.worst(one, made) <= 1e-4
        assert (len(made.tokens), made.finish, made.prompt) == (24, "length", 30)
        assert made.prefill_s > 0 and made.decode_s > 0


def test_a_seed_gives_the_same_tokens_alone_and_among_others(setup: Setup) -> None:
    asked = prompts(6, max_tokens=16)
    together = [made.tokens for made in setup.generate(*asked)]
    assert [setup.generate(one)[0].tokens for one in asked] == together
    assert len({tuple(tokens) for tokens in together}) > 1


def test_only_the_tokens_that_top_k_leaves_are_drawn_and_their_logprobs_know_it(setup: Setup) -> None:
    for made in setup.generate(*prompts(3, max_tokens=12, top_k=1)):
        assert made.logprobs == pytest.approx([0.0] * 12, abs=1e-5)


def test_a_stop_token_ends_the_answer_and_is_its_last_token(setup: Setup) -> None:
    plain = setup.generate(*prompts(1, max_tokens=20))[0]
    stop = plain.tokens[7]
    [asked] = prompts(1, max_tokens=20)
    made = setup.generate(replace(asked, sampling=structs.replace(asked.sampling, stop=(stop,))))[0]
    assert made.finish == "stop"
    assert made.tokens == plain.tokens[: plain.tokens.index(stop) + 1]


def test_requests_in_flight_go_on_with_the_new_weights_and_each_token_says_which_made_it(setup: Setup) -> None:
    asked = prompts(4, 40, max_tokens=300)
    before = setup.run(setup.engine.status()).version
    after = max(setup.versions.networks) + 1

    async def swap_in_flight() -> list[Completion]:
        running = await begun(setup.engine, *asked)
        setup.versions.publish(after)
        loaded = await setup.engine.load(setup.versions.published(after))
        assert (loaded.version, loaded.transport) == (after, "shared memory")
        assert loaded.exposed_s > 0 and loaded.bytes > 0
        return await asyncio.gather(*running)

    for one, made in zip(asked, setup.run(swap_in_flight()), strict=True):
        assert set(made.versions) == {before, after} and made.versions == sorted(made.versions)
        assert len(made.tokens) == 300
        assert setup.versions.worst(one, made) <= 1e-4


def test_a_cached_prefix_is_counted_and_does_not_outlive_its_weights(setup: Setup) -> None:
    [asked] = prompts(1, 100, max_tokens=8)
    setup.generate(asked)
    assert setup.generate(replace(asked, id="again"))[0].cached == 96
    version = setup.publish_and_load()
    made = setup.generate(replace(asked, id="anew"))[0]
    assert made.cached == 0 and set(made.versions) == {version}
    assert setup.versions.worst(asked, made) <= 1e-4


def test_a_version_that_is_not_published_leaves_the_old_one_in_use(setup: Setup) -> None:
    before = setup.run(setup.engine.status())
    with pytest.raises(EngineFailed, match="version 99 was not loaded"):
        setup.run(setup.engine.load(setup.versions.published(99)))
    [asked] = prompts(1, max_tokens=8)
    made = setup.generate(asked)[0]
    assert set(made.versions) == {before.version} and setup.versions.worst(asked, made) <= 1e-4
    assert setup.run(setup.engine.status()).swaps == before.swaps


def test_an_aborted_request_ends_with_the_tokens_that_it_has(setup: Setup) -> None:
    asked = request("aborted", [7] * 20, max_tokens=400)

    async def abort() -> Completion:
        (running,) = await begun(setup.engine, asked)
        await setup.engine.abort("aborted")
        return await running

    made = setup.run(abort())
    assert made.finish == "abort" and 0 < len(made.tokens) < 400
    assert setup.versions.worst(asked, made) <= 1e-4


def test_tokens_are_streamed_until_the_callback_ends_it(setup: Setup) -> None:
    asked, received = request("reported", [7] * 20, max_tokens=400), list[int]()

    def on_part(part: TokenPart) -> bool:
        received.extend(part.tokens)
        return len(received) >= 6

    made = setup.run(setup.engine.generate_in_parts(asked, 2, on_part))
    assert made.finish == "length" and 6 <= len(received) <= len(made.tokens) < 400
    assert made.tokens[: len(received)] == received
    assert setup.versions.worst(asked, made) <= 1e-4


def test_a_request_that_its_caller_gives_up_is_aborted_at_the_server(setup: Setup) -> None:
    async def give_up() -> None:
        (running,) = await begun(setup.engine, request("given up", [7] * 20, max_tokens=480))
        running.cancel()
        while (await setup.engine.status()).running:
            pass

    before = setup.run(setup.engine.status()).generated
    setup.run(give_up())
    assert setup.run(setup.engine.status()).generated - before < 480


def test_a_request_that_cannot_be_served_fails_alone(setup: Setup) -> None:
    async def both() -> Completion:
        good = asyncio.create_task(setup.engine.generate(request("good", [7] * 20, max_tokens=10)))
        with pytest.raises(EngineFailed, match="vocabulary"):
            await setup.engine.generate(request("bad", [99999], max_tokens=10))
        return await good

    assert len(setup.run(both()).tokens) == 10


def test_the_status_tells_what_the_router_needs(setup: Setup) -> None:
    before = setup.run(setup.engine.status())
    setup.generate(*prompts(4, 50, max_tokens=10))
    after = setup.run(setup.engine.status())
    assert after.generated - before.generated == 40
    assert 0 < after.prefilled - before.prefilled <= 200
    assert after.busy_s > before.busy_s and after.kv_budget == 64 << 20
    assert (after.running, after.waiting, after.kv_reserved) == (0, 0, 0)


def test_no_process_of_the_server_outlives_the_service_in_front_of_it(setup: Setup) -> None:
    """Killed so that it can do nothing about it, and without the sweep of whoever started it."""
    service = psutil.Process(setup.front.started.pid)
    family = service.children(recursive=True)
    assert len(family) >= 2
    os.kill(service.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    with contextlib.suppress(EngineFailed):
        setup.run(setup.engine.status())
