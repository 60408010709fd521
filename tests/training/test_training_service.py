import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_batch, save_tiny

from rollart.config import Training
from rollart.errors import ServiceError
from rollart.resources.launcher import Wish, service
from rollart.resources.local import LocalLauncher
from rollart.services import rpc
from rollart.training.client import TrainerClient
from rollart.training.service import TrainerService
from rollart.training.trainer import Trainer
from rollart.weights.store import WeightStore

REWARDS = [[1.0, 0.0, 0.5], [1.0, 0.0]]
DEADLINE_S = 120.0


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": str(save_tiny(tmp_path / "model")),
        "weights": str(tmp_path / "weights"),
        "config": Training().model_dump(mode="json"),
        "seed": 0,
        "version": 0,
        "checkpoint": None,
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
def test_a_trainer_process_steps_publishes_saves_and_resumes(tmp_path: Path, spec: dict[str, Any]) -> None:
    plain = Trainer(Path(spec["model"]), Training())
    store = WeightStore(Path(spec["weights"]))

    async def body() -> None:
        launcher = LocalLauncher()
        command = service("rollart.training.service", spec, name="t", logs=tmp_path)
        process = await launcher.launch(command, Wish())
        async with rpc.connected(process.answer["url"], key=launcher.key) as connection:
            trainer = TrainerClient(connection, DEADLINE_S)
            assert await trainer.publish() == 0
            metrics = await trainer.step(make_batch(0, REWARDS))
            assert metrics.values == plain.step(make_batch(0, REWARDS)).values
            assert await trainer.publish() == 1
            assert same(store.load(1), plain.snapshot()[1])
            assert not same(store.load(0), store.load(1))
            await trainer.save(tmp_path / "checkpoint")
            with pytest.raises(ServiceError, match="for version 0, but the trainer is at version 1"):
                await trainer.step(make_batch(0, REWARDS))
        await process.stop()

        resumed = spec | {"model": str(tmp_path / "checkpoint"), "checkpoint": str(tmp_path / "checkpoint")}
        process = await launcher.launch(replace(command, spec=resumed), Wish())
        async with rpc.connected(process.answer["url"], key=launcher.key) as connection:
            trainer = TrainerClient(connection, DEADLINE_S)
            metrics = await trainer.step(make_batch(1, REWARDS))
            assert metrics.values == plain.step(make_batch(1, REWARDS)).values
            await trainer.load(tmp_path / "checkpoint")
            assert await trainer.publish() == 1
        await process.stop()

    asyncio.run(body())


def test_a_step_does_not_wait_for_the_store(spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is held up until the step that was asked for after `publish` has ended."""

    async def body() -> None:
        service = TrainerService(spec)
        await service.open()
        loop, stepped, writing = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        write = WeightStore.publish

        def slow(store: WeightStore, version: int, tensors: dict[str, torch.Tensor]) -> None:
            loop.call_soon_threadsafe(writing.set)
            asyncio.run_coroutine_threadsafe(stepped.wait(), loop).result(DEADLINE_S)
            write(store, version, tensors)

        monkeypatch.setattr(WeightStore, "publish", slow)
        before = service._trainer.snapshot()[1]
        publishing = asyncio.create_task(service.publish())
        await asyncio.wait_for(writing.wait(), DEADLINE_S)
        metrics = await service.step(make_batch(0, REWARDS))
        assert metrics.version == 1
        assert not publishing.done()
        stepped.set()
        assert await publishing == 0
        assert same(WeightStore(Path(spec["weights"])).load(0), before)
        await service.close()

    asyncio.run(body())
