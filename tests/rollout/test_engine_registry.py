import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest
from world import Recorder

from benchmarks.modelled import ModelledEngine
from rollart.core.protocols import Engine
from rollart.rollout.engine_registry import EngineRegistry
from rollart.simulate.clock import run


def engine(**settings: Any) -> ModelledEngine:
    return ModelledEngine(random.Random(0), **settings)


def roster(engines: Mapping[str, Engine], version: int, recorder: Recorder) -> EngineRegistry:
    return EngineRegistry(engines, version, recorder, {}, lambda name: None)


def test_serving_is_the_oldest_version_that_a_request_could_meet() -> None:
    async def main() -> None:
        slow, fast = engine(load_seconds=lambda rng: 5.0), engine(load_seconds=lambda rng: 0.1)
        them = roster({"slow": slow, "fast": fast}, 0, Recorder())
        loading = asyncio.create_task(them.load(1))
        await asyncio.sleep(1)
        assert them.serving == 0
        await loading
        assert them.serving == 1

    run(main())


def test_serving_follows_engines_that_come_and_go() -> None:
    async def main() -> None:
        them = roster({"x": engine(), "y": engine()}, 3, Recorder())
        them.replace("y", engine(), 1)
        assert them.serving == 1
        them.lost("y", "gone")
        assert them.serving == 3
        them.replace("y", engine(), 2)
        assert them.serving == 2
        them.remove("y")
        them.replace("z", engine(), 4)
        them.lost("x", "gone")
        them.remove("x")
        assert them.serving == 4
        them.lost("z", "gone")
        assert them.serving == them.target == 3

    run(main())


def test_a_fast_engine_goes_on_to_the_next_version_while_a_slow_one_still_loads_the_last() -> None:
    async def main() -> None:
        slow, fast = engine(load_seconds=lambda rng: 5.0), engine(load_seconds=lambda rng: 0.1)
        them = roster({"slow": slow, "fast": fast}, 0, Recorder())
        first = asyncio.create_task(them.load(1))
        await asyncio.sleep(1)
        second = asyncio.create_task(them.load(2))
        await asyncio.sleep(1)
        assert (slow.version, fast.version) == (0, 2)
        await asyncio.gather(first, second)
        assert (slow.version, fast.version, them.serving) == (2, 2, 2)
        assert asyncio.get_running_loop().time() == pytest.approx(10, abs=0.5)

    run(main())
