"""One engine over two processes, each with its part of every weight."""

import asyncio
from pathlib import Path

import pytest
from vllm_fleet import MOE, NEEDS_VLLM, START_S, TINY, Versions, fronted, request

from rollart.config import TinyModelConfig

pytestmark = [pytest.mark.slow, NEEDS_VLLM, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("tiny", [TINY, MOE], ids=["dense", "experts"])
def test_two_workers_serve_as_one_engine_and_both_take_new_weights(tmp_path: Path, tiny: TinyModelConfig) -> None:
    """Also of experts each has a part."""
    versions = Versions.made(tmp_path, tiny)
    asked = [request(str(index), [5 + index] * 40, max_tokens=12, seed=index) for index in range(3)]

    async def body() -> None:
        async with fronted(versions, tmp_path, tensor_parallel=2) as front:
            for version in (0, 1):
                if version:
                    versions.publish(version)
                    await front.engine.load(versions.published(version))
                for one in asked:
                    made = await front.engine.generate(one)
                    assert set(made.versions) == {version} and versions.worst(one, made) <= 1e-4

    asyncio.run(asyncio.wait_for(body(), START_S))
