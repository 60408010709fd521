import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from plain_weights import Made, at
from tiny_decoders import decoder, request, twin, worst
from torch import Tensor

from rollart.config import EngineConfig
from rollart.core.errors import EngineFailed
from rollart.core.types import Completion
from rollart.engines.contexts import StreamRequest
from rollart.engines.torch.engine import TorchEngine
from rollart.engines.torch.model import EngineModel
from rollart.weights.publish import publish
from rollart.weights.reader import WeightReader

DEADLINE_S = 60.0


def drive(
    network: Any, scenario: Callable[[TorchEngine], Awaitable[None]], *, on_swap: Any = "recompute", **options: Any
) -> None:
    """Runs the scenario in a started engine, within a deadline."""

    async def body() -> None:
        config = EngineConfig(on_swap=on_swap)
        async with asyncio.timeout(DEADLINE_S), TorchEngine(EngineModel(twin(network)), config, **options) as engine:
            await scenario(engine)

    asyncio.run(body())


async def until_generating(engine: TorchEngine) -> None:
    while (await engine.status()).generated == 0:
        pass


def test_requests_from_many_coroutines_share_the_steps() -> None:
    network = decoder()

    async def scenario(engine: TorchEngine) -> None:
        group = [request(str(index), [1 + index] * (5 + index), max_tokens=20, seed=index) for index in range(10)]
        done = await asyncio.gather(*map(engine.generate, group))
        assert (
            max(worst({0: network}, asked, completion) for asked, completion in zip(group, done, strict=True)) <= 1e-4
        )
        status = await engine.status()
        assert (status.running, status.waiting, status.generated) == (0, 0, 200)
        assert 0 < status.kv_bytes <= status.kv_budget and status.busy_s > 0

    drive(network, scenario)


def test_weights_are_swapped_under_requests_in_flight(tmp_path: Any) -> None:
    networks = {0: decoder(seed=1), 1: decoder(seed=2)}
    publications = [publish(tmp_path, version, networks[1].state_dict()) for version in (1, 2)]

    async def scenario(engine: TorchEngine) -> None:
        asked = request("1", [1, 2, 3], max_tokens=400, seed=1)
        running = asyncio.create_task(engine.generate(asked))
        await until_generating(engine)
        loaded = await engine.load(publications[0])
        completion = await running
        assert completion.versions == sorted(completion.versions) and set(completion.versions) == {0, 1}
        assert worst(networks, asked, completion) <= 1e-4
        status = await engine.status()
        assert (status.version, status.swaps) == (1, 1)
        size = sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in networks[1].state_dict().values()}.values())
        assert loaded.transport == "shared memory" and size <= loaded.bytes < 1.1 * size
        assert 0 < loaded.exposed_s < loaded.transfer_s

    drive(networks[0], scenario, store=WeightReader(tmp_path))


def test_a_draining_engine_swaps_when_its_requests_have_ended(tmp_path: Any) -> None:
    networks = {0: decoder(seed=1), 1: decoder(seed=2)}
    publication = publish(tmp_path, 1, networks[1].state_dict())

    async def scenario(engine: TorchEngine) -> None:
        running = asyncio.create_task(engine.generate(request("1", [1, 2, 3], max_tokens=200, seed=1)))
        await until_generating(engine)
        loading = asyncio.create_task(engine.load(publication))
        assert set((await running).versions) == {0}
        assert (await loading).recomputed == 0
        assert set((await engine.generate(request("2", [1, 2, 3], max_tokens=4))).versions) == {1}

    drive(networks[0], scenario, store=WeightReader(tmp_path), on_swap="drain")


def test_an_engine_computes_with_the_published_memory_itself_and_lets_go_of_it_at_the_next_swap(tmp_path: Any) -> None:
    networks = {0: decoder(seed=1), 1: decoder(seed=2), 2: decoder(seed=3)}
    weights = WeightReader(tmp_path)

    async def scenario(engine: TorchEngine) -> None:
        for version in (1, 2):
            await engine.load(publish(tmp_path, version, networks[version].state_dict()))
            held = engine._held
            assert held is not None
            for name, tensor in engine._model.network.state_dict().items():
                assert tensor.data_ptr() == held.tensors[name].data_ptr()
            asked = request(f"{version}", [1, 2, 3], max_tokens=5, seed=1)
            assert worst(networks, asked, await engine.generate(asked)) <= 1e-4
        await engine.load(publish(tmp_path, 3, networks[2].state_dict()))
        assert len(list(tmp_path.glob("*.data"))) == 2

    drive(networks[0], scenario, store=weights)


def test_a_version_that_is_not_there_leaves_the_engine_on_its_own(tmp_path: Any) -> None:
    async def scenario(engine: TorchEngine) -> None:
        with pytest.raises(EngineFailed, match="version 7 was not loaded"):
            await engine.load(at(7))
        assert (await engine.generate(request("1", [1], max_tokens=2))).versions == [0, 0]

    drive(decoder(), scenario, store=WeightReader(tmp_path))


def test_a_damaged_version_is_not_loaded_and_generation_goes_on_with_the_old_one(tmp_path: Any) -> None:
    networks = {0: decoder(seed=1), 1: decoder(seed=2)}
    publication = publish(tmp_path, 1, networks[1].state_dict())
    (data,) = tmp_path.glob("*.data")
    with open(data, "rb+") as file:
        file.seek(1000)
        file.write(b"wrong")

    async def scenario(engine: TorchEngine) -> None:
        with pytest.raises(EngineFailed, match=r"version 1 was not loaded: bucket 0 of shard 0 .* wrong checksum"):
            await engine.load(publication)
        asked = request("1", [1, 2, 3], max_tokens=5, seed=1)
        completion = await engine.generate(asked)
        assert set(completion.versions) == {0} and worst(networks, asked, completion) <= 1e-4

    drive(networks[0], scenario, store=WeightReader(tmp_path))


def test_an_engine_without_a_store_says_so() -> None:
    async def scenario(engine: TorchEngine) -> None:
        with pytest.raises(EngineFailed, match="has no weight store"):
            await engine.load(at(1))

    drive(decoder(), scenario)


@pytest.mark.parametrize("every", [1, 4])
def test_tokens_are_streamed_in_order_except_the_last(every: int) -> None:
    async def scenario(engine: TorchEngine) -> None:
        reported: list[Any] = []
        completion = await engine.stream(StreamRequest(request("1", [1], max_tokens=30), every), reported.append)
        for field in ("tokens", "logprobs", "versions"):
            received = [value for part in reported for value in getattr(part, field)]
            whole = getattr(completion, field)
            assert received == whole[: len(received)] and 0 < len(whole) - len(received) <= every
        assert [len(part.tokens) for part in reported] == [1] + [every] * (len(reported) - 1)

    drive(decoder(), scenario)


@pytest.mark.parametrize("cut", [1, 7, 29])
def test_an_answer_that_goes_on_at_another_engine_is_the_one_that_the_first_would_have_given(cut: int) -> None:
    async def scenario(engine: TorchEngine) -> None:
        whole = await engine.generate(request("1", [1, 2, 3], max_tokens=30))
        asked = request("1", [1, 2, 3, *whole.tokens[:cut]], max_tokens=30 - cut)
        rest = await engine.generate(replace(asked, resumed=cut))
        assert whole.tokens == [*whole.tokens[:cut], *rest.tokens]
        assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-4)

    drive(decoder(), scenario)


def test_a_request_that_is_aborted_because_it_is_enough_leaves_its_kv() -> None:
    async def scenario(engine: TorchEngine) -> None:
        async def abort() -> None:
            await engine.abort("1")

        aborting: list[asyncio.Task[None]] = []

        def tell(tokens: object) -> None:
            if not aborting:
                aborting.append(asyncio.create_task(abort()))

        asked = request("1", [1] * 20, "s", max_tokens=500)
        made = await engine.stream(StreamRequest(asked, 3), tell)
        assert made.finish == "abort" and 1 <= len(made.tokens) < 500
        again = await engine.generate(request("2", [*asked.tokens, *made.tokens, 1], "s", max_tokens=2))
        assert again.cached == 20 + len(made.tokens) - 1

    drive(decoder(), scenario)


def test_an_aborted_request_returns_what_it_has() -> None:
    async def scenario(engine: TorchEngine) -> None:
        running = asyncio.create_task(engine.generate(request("1", [1], max_tokens=500)))
        await until_generating(engine)
        await engine.abort("1")
        completion = await running
        assert completion.finish == "abort" and 0 < len(completion.tokens) < 500

    drive(decoder(), scenario)


def test_a_caller_who_gives_up_frees_the_row() -> None:
    async def scenario(engine: TorchEngine) -> None:
        running = asyncio.create_task(engine.generate(request("1", [1], max_tokens=500)))
        await until_generating(engine)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        status = await engine.status()
        assert status.running == 0 and status.generated < 500
        assert len((await engine.generate(request("1", [1], max_tokens=3))).tokens) == 3

    drive(decoder(), scenario)


def test_an_id_that_is_in_flight_is_refused() -> None:
    async def scenario(engine: TorchEngine) -> None:
        running = asyncio.create_task(engine.generate(request("1", [1], max_tokens=500)))
        await until_generating(engine)
        with pytest.raises(EngineFailed, match="already in flight"):
            await engine.generate(request("1", [1]))
        running.cancel()

    drive(decoder(), scenario)


def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = EngineModel.forward
    broken = {"now": True}

    def sometimes(model: EngineModel, step: Any) -> Tensor:
        if broken["now"]:
            raise MemoryError("no memory for the step")
        return forward(model, step)

    monkeypatch.setattr(EngineModel, "forward", sometimes)

    async def scenario(engine: TorchEngine) -> None:
        pair = [engine.generate(request(name, [1], max_tokens=3)) for name in "ab"]
        failures = await asyncio.gather(*pair, return_exceptions=True)
        assert all("MemoryError: no memory for the step" in str(failure) for failure in failures)
        assert all(isinstance(failure, EngineFailed) for failure in failures)
        broken["now"] = False
        assert len((await engine.generate(request("c", [1], max_tokens=3))).tokens) == 3

    drive(decoder(), scenario)


def test_closing_fails_open_requests_and_refuses_new_ones() -> None:
    async def scenario(engine: TorchEngine) -> None:
        running: asyncio.Task[Completion] = asyncio.create_task(engine.generate(request("1", [1], max_tokens=500)))
        await until_generating(engine)
        await engine.close()
        with pytest.raises(EngineFailed, match="closed"):
            await running
        with pytest.raises(EngineFailed, match="not running"):
            await engine.generate(request("2", [1]))

    drive(decoder(), scenario)


def test_reading_new_weights_does_not_hold_up_generation() -> None:
    """The store blocks until the request has finished: only an engine that generates meanwhile gets through."""
    network = decoder()

    async def body() -> None:
        loop = asyncio.get_running_loop()
        finished = asyncio.Event()

        def slow(version: int) -> Mapping[str, Tensor]:
            asyncio.run_coroutine_threadsafe(finished.wait(), loop).result(DEADLINE_S)
            return {name: tensor + torch.tensor(0.01) for name, tensor in network.state_dict().items()}

        async with TorchEngine(EngineModel(twin(network)), EngineConfig(), store=Made(slow)) as engine:
            loading = asyncio.create_task(engine.load(at(1)))
            completion = await engine.generate(request("1", [1], max_tokens=50))
            finished.set()
            await loading
            assert set(completion.versions) == {0}
            assert (await engine.status()).version == 1

    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))
