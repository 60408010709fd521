"""The modelled engine against what a pass-by-pass engine would do."""

import asyncio
from typing import Any, cast

import pytest

from rollart.config.training import MODELS
from rollart.core.run_length import RunLength, lowest
from rollart.core.types import Completion, GenerationRequest, Publication, Sampling
from rollart.hardware.devices import CATALOGUE
from rollart.hardware.roofline import ModelShape, Roofline
from rollart.simulator.clock import run
from rollart.simulator.engine import SimulatedEngine
from rollart.simulator.pass_cost import PassCost, seconds_of
from rollart.simulator.weight_transfer import WeightTransfer

COST = PassCost(Roofline(CATALOGUE["H800"], ModelShape.of(MODELS["qwen3-8b"])))


def engine(**changed: Any) -> SimulatedEngine:
    weights = WeightTransfer(16_000_000_000, "store", 25e9, 50e9)
    limits = {"max_batch": 64, "chunk": 2048, "kv_tokens": 300_000} | changed
    return SimulatedEngine("one", COST, weights, lambda request: (request.sampling.max_tokens, "stop"), **limits)


def request(session: str, tokens: int, answer: int, turn: int = 0, opening: int = 1) -> GenerationRequest:
    context = cast(list[int], RunLength.of(opening, tokens))
    return GenerationRequest(f"{session}/{turn}", session, "task", turn, context, Sampling(max_tokens=answer))


def decoding(answer: int, batch: int, length: int) -> float:
    fixed, slope = COST.decode(batch, batch * (length + 1.0))
    return seconds_of(answer - 1, fixed, slope, batch, batch * (length + 1.0))


def test_a_single_request_takes_its_prefill_and_its_decode_passes() -> None:
    async def main() -> Completion:
        return await engine().generate(request("a", 1000, 500))

    done = run(main())
    assert done.prefill_s == pytest.approx(COST.mixed(1000, 1000 * 500, 1000, 1.0, 0, 0.0))
    assert done.decode_s == pytest.approx(decoding(500, 1, 1000), rel=1e-3)
    assert len(done.tokens) == len(done.versions) == 500


def test_sequences_of_one_batch_share_the_reading_of_the_weights() -> None:
    async def main(count: int) -> float:
        one = engine()
        await asyncio.gather(*(one.generate(request(str(n), 100, 400, opening=n)) for n in range(count)))
        return asyncio.get_running_loop().time()

    assert run(main(16)) < 2 * run(main(1))


def test_a_request_that_leaves_out_past_turns_has_only_its_prompt_cached() -> None:
    async def main() -> Completion:
        one = engine(context=lambda request: min(len(request.tokens), 1000 + 300))
        await one.generate(request("a", 1000, 100))
        context = cast(list[int], RunLength.of(1, 1000) + RunLength.of(0, 5000))
        return await one.generate(GenerationRequest("a/9", "a", "task", 9, context, Sampling(max_tokens=10)))

    done = run(main())
    assert (done.prompt, done.cached) == (1300, 1000)


def test_the_next_turn_prefills_only_what_is_new() -> None:
    async def main() -> Completion:
        one = engine()
        await one.generate(request("a", 4000, 100))
        return await one.generate(request("a", 4200, 100, turn=1))

    assert run(main()).cached == 4099


def test_members_of_a_group_prefill_their_prompt_once() -> None:
    async def main() -> int:
        one = engine()
        await asyncio.gather(*(one.generate(request(str(n), 5000, 10, opening=7)) for n in range(8)))
        return one.prefilled

    assert run(main()) == 5000 + 7


def test_preempted_sequences_resume_and_lose_no_token() -> None:
    async def main() -> tuple[list[Completion], int]:
        one = engine(kv_tokens=10_000)
        asked = (one.generate(request(str(n), 2000, 1500, opening=n)) for n in range(4))
        return list(await asyncio.gather(*asked)), one.preempted

    done, preempted = run(main())
    assert preempted > 0
    assert [len(each.versions) for each in done] == [1500] * 4


def test_the_end_of_cached_kv_is_evicted_when_room_is_needed() -> None:
    async def main() -> int:
        one = engine(kv_tokens=10_000)
        await one.generate(request("old", 6000, 10, opening=1))
        await one.generate(request("new", 6000, 10, opening=2))
        return (await one.generate(request("old", 6100, 10, turn=1))).cached

    assert 3900 < run(main()) < 4000


def test_a_swap_during_a_request_splits_its_versions_and_stops_the_engine_only_for_the_exposed_part() -> None:
    async def main() -> tuple[Completion, float]:
        one = engine()
        going = asyncio.create_task(one.generate(request("a", 1000, 4000)))
        await asyncio.sleep(5.0)
        loaded = await one.load(Publication(1))
        return await going, loaded.exposed_s

    done, exposed = run(main())
    versions = cast(RunLength, done.versions)
    assert lowest(versions) == 0 and versions[-1] == 1 and len(versions) == 4000
    assert done.decode_s == pytest.approx(decoding(4000, 1, 1000) + exposed, rel=0.02)


def test_a_cancelled_request_leaves_the_batch() -> None:
    async def main() -> tuple[int, float]:
        one = engine()
        gone = asyncio.create_task(one.generate(request("gone", 1000, 100_000, opening=1)))
        stays = asyncio.create_task(one.generate(request("stays", 1000, 100, opening=2)))
        await asyncio.sleep(0.2)
        gone.cancel()
        await stays
        status = await one.status()
        return status.running, asyncio.get_running_loop().time()

    running, ended = run(main())
    assert running == 0
    assert ended < 3.0


def test_kv_of_another_engine_is_fetched_and_not_computed() -> None:
    async def main() -> tuple[Completion, int]:
        first, second = engine(), engine()
        second.url = "two"
        asked = request("a", 8000, 50)
        await first.prefill(asked)
        moved = GenerationRequest(asked.id, "a", "task", 0, asked.tokens, asked.sampling, kv_from="one")
        return await second.generate(moved), second.prefilled

    done, prefilled = run(main())
    assert done.fetched == 7999
    assert prefilled == 1
