import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_batch, save_tiny

from rollart.config import AlgorithmConfig, TrainingConfig
from rollart.core.errors import ServiceError
from rollart.launch import rpc
from rollart.launch.launcher import ResourceRequest, service_command
from rollart.launch.local import LocalLauncher
from rollart.training.client import TrainerClient
from rollart.training.trainer import Trainer
from rollart.weights.reader import WeightReader

REWARDS = [[1.0, 0.0, 0.5], [1.0, 0.0]]
DEADLINE_S = 120.0


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


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
def test_a_trainer_process_steps_publishes_saves_and_resumes(tmp_path: Path, spec: dict[str, Any]) -> None:
    plain = Trainer(Path(spec["model"]), TrainingConfig())
    weights = WeightReader(Path(spec["weights"]))

    async def body() -> None:
        launcher = LocalLauncher()
        command = service_command("rollart.training.service", spec, name="t", logs=tmp_path)
        process = await launcher.launch(command, ResourceRequest())
        async with rpc.connected(process.answer["url"], key=launcher.key) as connection:
            trainer = TrainerClient(connection, DEADLINE_S)
            assert (await trainer.publish()).version == 0
            metrics = await trainer.step(make_batch(0, REWARDS))
            assert metrics.values == plain.step(make_batch(0, REWARDS)).values
            publication = await trainer.publish()
            assert publication.version == 1
            held = weights.fetch(publication)
            assert same(held.tensors, plain.snapshot()[1])
            held.release()
            await trainer.save(tmp_path / "checkpoint")
            assert not await trainer.saved()
            (tmp_path / "file").touch()
            await trainer.save(tmp_path / "file" / "checkpoint")
            assert "could not be written" in await trainer.saved()
            with pytest.raises(ServiceError, match="for version 0, but the trainer is at version 1"):
                await trainer.step(make_batch(0, REWARDS))
        await process.stop()

        resumed = spec | {"checkpoint": str(tmp_path / "checkpoint")}
        process = await launcher.launch(replace(command, spec=resumed), ResourceRequest())
        async with rpc.connected(process.answer["url"], key=launcher.key) as connection:
            trainer = TrainerClient(connection, DEADLINE_S)
            metrics = await trainer.step(make_batch(1, REWARDS))
            assert metrics.values == plain.step(make_batch(1, REWARDS)).values
            await trainer.load(tmp_path / "checkpoint")
            assert (await trainer.publish()).version == 1
        await process.stop()

    asyncio.run(body())


@pytest.mark.slow
def test_a_trainer_process_finds_own_losses_in_the_folder_of_the_run(tmp_path: Path, spec: dict[str, Any]) -> None:
    code = "def scaled(inputs):\n    return -2 * inputs.advantages * inputs.logprobs\n"
    (tmp_path / "loss_of_a_user.py").write_text(code)
    plain = Trainer(Path(spec["model"]), TrainingConfig(algorithm=AlgorithmConfig(loss="reinforce")))
    own = TrainingConfig(algorithm=AlgorithmConfig(loss="loss_of_a_user:scaled"))

    async def body() -> None:
        launcher = LocalLauncher()
        more = {"config": own.model_dump(mode="json"), "path": str(tmp_path)}
        command = service_command("rollart.training.service", spec | more, name="t", logs=tmp_path)
        process = await launcher.launch(command, ResourceRequest())
        async with rpc.connected(process.answer["url"], key=launcher.key) as connection:
            metrics = await TrainerClient(connection, DEADLINE_S).step(make_batch(0, REWARDS))
            assert metrics.values["loss"] == pytest.approx(2 * plain.step(make_batch(0, REWARDS)).values["loss"])
        await process.stop()

    asyncio.run(body())
