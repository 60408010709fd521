import asyncio
import random
from typing import Any

import pytest
from world import Recorder

from benchmarks.modelled import ModelledEngine
from rollart.core.types import Publication
from rollart.rollout.engine_registry import EngineRegistry
from rollart.simulator.clock import run


def engine(**settings: Any) -> ModelledEngine:
    return ModelledEngine(random.Random(0), **settings)


def test_serving_is_the_oldest_version_that_a_request_could_meet() -> None:
    async def main() -> None:
        slow, fast = engine(load_seconds=lambda rng: 5.0), engine(load_seconds=lambda rng: 0.1)
        engines = EngineRegistry({"slow": slow, "fast": fast}, 0, Recorder())
        loading = asyncio.create_task(engines.load(Publication(1)))
        await asyncio.sleep(1)
        assert engines.serving == 0
        await loading
        assert engines.serving == 1

    run(main())


def test_serving_follows_engines_that_come_and_go() -> None:
    async def main() -> None:
        engines = EngineRegistry({"x": engine(), "y": engine()}, 3, Recorder())
        engines.add("y", engine(), 1)
        assert engines.serving == 1
        engines.mark_lost("y", "gone")
        assert engines.serving == 3
        engines.add("y", engine(), 2)
        assert engines.serving == 2
        engines.remove("y")
        engines.add("z", engine(), 4)
        engines.mark_lost("x", "gone")
        engines.remove("x")
        assert engines.serving == 4
        engines.mark_lost("z", "gone")
        assert engines.serving == engines.target == 3

    run(main())


def test_a_fast_engine_goes_on_to_the_next_version_while_a_slow_one_still_loads_the_last() -> None:
    async def main() -> None:
        slow, fast = engine(load_seconds=lambda rng: 5.0), engine(load_seconds=lambda rng: 0.1)
        engines = EngineRegistry({"slow": slow, "fast": fast}, 0, Recorder())
        first = asyncio.create_task(engines.load(Publication(1)))
        await asyncio.sleep(1)
        second = asyncio.create_task(engines.load(Publication(2)))
        await asyncio.sleep(1)
        assert (slow.version, fast.version) == (0, 2)
        await asyncio.gather(first, second)
        assert (slow.version, fast.version, engines.serving) == (2, 2, 2)
        assert asyncio.get_running_loop().time() == pytest.approx(10, abs=0.5)

    run(main())
