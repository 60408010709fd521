import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import DEADLINE_S, free_address, spread_trainer, start_rank
from tiny_models import make_batch, save_tiny

from rollart.config import TrainingConfig
from rollart.core.errors import ServiceError
from rollart.training.trainer import Trainer
from rollart.weights.reader import WeightReader

pytestmark = pytest.mark.slow

REWARDS = [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0]]


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": str(save_tiny(tmp_path / "model")),
        "weights": str(tmp_path / "weights"),
        "config": TrainingConfig().model_dump(mode="json"),
        "seed": 0,
        "version": 0,
        "checkpoint": None,
    }


def test_rank_0_serves_for_all_and_takes_them_along_when_it_ends(tmp_path: Path, spec: dict[str, Any]) -> None:
    alone = Trainer(tmp_path / "model", TrainingConfig())

    async def body() -> None:
        async with spread_trainer(spec, 2, tmp_path) as (trainer, ranks):
            for step in range(3):
                got, expected = await trainer.step(make_batch(step, REWARDS)), alone.step(make_batch(step, REWARDS))
                assert got.values == pytest.approx(expected.values, abs=1e-4)
            publication = await trainer.publish()
            assert publication.version == 3 and len(publication.sources) == 2
            # Here both shards are found in memory, elsewhere both are fetched from the rank that has them.
            for root in (tmp_path / "weights", tmp_path / "another host"):
                held = (reader := WeightReader(root)).fetch(publication)
                assert held.transport == ("shared memory" if root.name == "weights" else "http")
                expected_tensors = alone.snapshot()[1]
                assert held.tensors.keys() == expected_tensors.keys()
                for name, tensor in expected_tensors.items():
                    assert torch.allclose(held.tensors[name], tensor, atol=1e-4)
                held.release()
                if root.name != "weights":
                    reader.close()
            await trainer.save(tmp_path / "checkpoint")
            assert not await trainer.saved()
            with pytest.raises(ServiceError, match="does not exist"):
                await trainer.load(tmp_path / "nothing")
            await trainer.load(tmp_path / "checkpoint")
            ranks[0].close_stdin()
            assert [await rank.ended() for rank in ranks] == [0, 0]
            assert "Traceback" not in "".join(rank.log.read_text() for rank in ranks)

    asyncio.run(body())


def test_a_killed_rank_ends_the_others_with_a_sentence(tmp_path: Path, spec: dict[str, Any]) -> None:
    async def body() -> None:
        async with spread_trainer(spec, 3, tmp_path) as (trainer, ranks):
            await trainer.step(make_batch(0, REWARDS))
            ranks[1].send(signal.SIGKILL)
            with pytest.raises(ServiceError, match="was lost"):
                await trainer.step(make_batch(1, REWARDS))
            for number in (0, 2):
                assert await ranks[number].ended() == 1
                last = ranks[number].log.read_text().splitlines()[-1]
                assert f"rank {number} of 3 of the trainer failed, or lost the others" in last

    asyncio.run(body())


def test_the_end_of_stdin_ends_a_rank_inside_a_collective(tmp_path: Path, spec: dict[str, Any]) -> None:
    """The other rank is stopped, so that rank 0 waits for it in the middle of a step."""

    async def body() -> None:
        async with spread_trainer(spec, 2, tmp_path) as (trainer, ranks):
            ranks[1].send(signal.SIGSTOP)
            step = asyncio.create_task(trainer.step(make_batch(0, REWARDS)))
            with pytest.raises(ServiceError, match="no method"):  # this answer shows that the step has begun
                await trainer._client.call("nothing", returns=int, deadline=DEADLINE_S)
            ranks[0].close_stdin()
            assert await ranks[0].ended() == 0
            assert not (tmp_path / "weights").exists()
            with pytest.raises(ServiceError):
                await step
            ranks[1].close_stdin()
            ranks[1].send(signal.SIGCONT)
            assert await ranks[1].ended() == 0

    asyncio.run(body())


def test_a_rank_that_waits_for_the_others_exits_on_request(tmp_path: Path, spec: dict[str, Any]) -> None:
    async def body() -> None:
        group = {"rank": 0, "ranks": 2, "address": free_address()}
        rank = await start_rank(spec | {"group": group}, tmp_path / "rank.log")
        rank.close_stdin()
        assert await rank.ended() == 0

    asyncio.run(body())
