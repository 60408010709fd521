"""The trainer of robot policies as a service: `python -m rollart.robots.service`.

Its spec has `config` (`LearnerConfig`), and for each member of the stack a file of demonstrations in `data`, a seed and
the name of its task; `checkpoint`, if there is one, is where it goes on. With `tuning` (`TuningConfig`) it tunes the
policy in the folder `start` by RL. Calls run one after the other in one thread.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from rollart.config.robots import TuningConfig
from rollart.core.errors import ServiceError, ServiceSilent
from rollart.core.events import EventSink
from rollart.launch import rpc, service
from rollart.launch.launcher import Launcher, ResourceRequest, service_command, service_started
from rollart.launch.rpc import Handler, RpcClient
from rollart.robots import demonstrations
from rollart.robots.chunks import ImitationData
from rollart.robots.learner import ImitationLearner, LearnerConfig, TrainedPolicy
from rollart.robots.tuning_learner import ChunkBatch, TuningLearner

T = TypeVar("T")


class RobotTrainerService:
    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._thread = ThreadPoolExecutor(1, "trainer")
        self._tasks: list[str] = spec["tasks"]
        config = LearnerConfig.model_validate(spec["config"])
        torch.set_num_threads(config.training.threads)
        episodes = spec["episodes"]
        data = [ImitationData.of(demonstrations.load(Path(path), episodes), config.control) for path in spec["data"]]
        if "tuning" in spec:
            tuning, start = TuningConfig.model_validate(spec["tuning"]), TrainedPolicy(Path(spec["start"]))
            self._learner: ImitationLearner = TuningLearner(config, tuning, start, data[0], spec["seeds"][0])
        else:
            self._learner = ImitationLearner(config, data, spec["seeds"])
        if spec.get("checkpoint"):
            self._learner.load(Path(spec["checkpoint"]))

    async def train(self, steps: int) -> list[float]:
        return await self._run(lambda: self._learner.train(steps))

    async def cpu_seconds(self) -> float:
        return time.process_time()

    async def update(self, batch: bytes) -> dict[str, float]:
        learner = self._learner
        assert isinstance(learner, TuningLearner)
        return await self._run(lambda: learner.update(ChunkBatch.decode(batch)))

    async def save(self, path: str) -> None:
        await self._run(lambda: self._learner.save(Path(path)))

    async def export(self, folders: list[str]) -> None:
        await self._run(lambda: self._learner.export([Path(folder) for folder in folders], self._tasks))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class RobotTrainerClient:
    """Each call has `deadline` seconds. Raises ServiceError."""

    def __init__(self, client: RpcClient, deadline: float) -> None:
        self._client, self._deadline = client, deadline

    async def train(self, steps: int) -> list[float]:
        """The mean loss of each member over `steps`."""
        return await self._call("train", steps, list[float])

    async def cpu_seconds(self) -> float:
        """What the process has used so far."""
        return await self._call("cpu_seconds", None, float)

    async def update(self, batch: ChunkBatch) -> dict[str, float]:
        """One version by RL; means over its optimizer steps."""
        return await self._call("update", batch.encode(), dict[str, float])

    async def save(self, path: Path) -> None:
        await self._call("save", str(path.absolute()), type(None))

    async def export(self, folders: Sequence[Path]) -> None:
        await self._call("export", [str(folder.absolute()) for folder in folders], type(None))

    async def _call(self, method: str, argument: object, returns: type[T]) -> T:
        try:
            return await self._client.call(method, argument, returns=returns, deadline=self._deadline)
        except ServiceSilent as error:
            raise ServiceError(f"the trainer hangs: {error}; raise training.deadline if it needs longer") from error


@asynccontextmanager
async def trainer(
    launcher: Launcher, spec: Mapping[str, Any], *, config: LearnerConfig, logs: Path, name: str, sink: EventSink
) -> AsyncIterator[RobotTrainerClient]:
    """A trainer in a process of its own. Raises ServiceError."""
    loop, training = asyncio.get_running_loop(), config.training
    full = {**spec, "config": config.model_dump(mode="json")}
    command = service_command("rollart.robots.service", full, name=name, logs=logs, threads=training.threads)
    began = loop.time()
    started = await launcher.launch(command, ResourceRequest())
    try:
        async with rpc.connected(str(started.answer["url"]), key=launcher.key) as client:
            sink.emit(service_started("train", name, started, loop.time() - began))
            yield RobotTrainerClient(client, training.deadline)
    finally:
        await started.stop()


@asynccontextmanager
async def build(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Handler]]:
    made = RobotTrainerService(spec)
    try:
        handlers = (made.train, made.cpu_seconds, made.update, made.save, made.export)
        yield {handler.__name__: handler for handler in handlers}
    finally:
        made.close()


if __name__ == "__main__":
    service.main(build)
