"""One engine over two processes, each with its part of every weight."""

import asyncio
from pathlib import Path

import pytest
from vllm_fleet import NEEDS_VLLM, START_S, TINY, Versions, fronted, request, settings

from rollart.config import TinyModelConfig

pytestmark = [pytest.mark.slow, NEEDS_VLLM, pytest.mark.timeout(1800)]


MOE = TinyModelConfig(architecture="qwen3_moe", hidden=64, layers=2, heads=2, kv_heads=2, context=512)


@pytest.mark.parametrize(
    ("tiny", "args"),
    [(TINY, []), (MOE, []), (MOE, ["--enable-expert-parallel"])],
    ids=["dense", "experts cut", "experts whole"],
)
def test_two_workers_serve_as_one_engine_and_both_take_new_weights(
    tmp_path: Path, tiny: TinyModelConfig, args: list[str]
) -> None:
    """A worker has a part of every expert, or all of some."""
    versions = Versions.made(tmp_path, tiny)
    asked = [request(str(index), [5 + index] * 40, max_tokens=12, seed=index) for index in range(3)]

    async def body() -> None:
        async with fronted(versions, tmp_path, tensor_parallel=2, vllm=settings(args=args)) as front:
            for version in (0, 1):
                if version:
                    versions.publish(version)
                    await front.engine.load(versions.published(version))
                for one in asked:
                    made = await front.engine.generate(one)
                    assert set(made.versions) == {version} and versions.worst(one, made) <= 1e-4

    asyncio.run(asyncio.wait_for(body(), START_S))
