"""The trainer as a service of its own process: `python -m rollart.training.service`.

Invariants: everything that touches the trainer runs in one thread, in the order of the calls, so a step never overlaps
a save or a snapshot; the event loop only waits, so the service answers while a step runs. `publish` takes a copy of the
weights in that thread and writes it in a second one: the next step waits for a memcpy, not for the store. `publish`
answers once the version is in the store, and versions are written in order.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from rollart.config import Training
from rollart.services import process
from rollart.services.rpc import Handler
from rollart.training.checkpoint import load_checkpoint, save_checkpoint
from rollart.training.trainer import Trainer
from rollart.types import Batch, StepMetrics
from rollart.weights.store import WeightStore

T = TypeVar("T")


class TrainerService:
    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._store = WeightStore(Path(spec["weights"]))
        self._training = ThreadPoolExecutor(1, "trainer")
        self._writing = ThreadPoolExecutor(1, "weights")
        self._trainer: Trainer

    async def open(self) -> None:
        def build() -> Trainer:
            spec = self._spec
            config = Training.model_validate(spec["config"])
            trainer = Trainer(Path(spec["model"]), config, seed=spec["seed"], version=spec["version"])
            if spec.get("checkpoint"):
                load_checkpoint(trainer, Path(spec["checkpoint"]))
            return trainer

        self._trainer = await self._train(build)

    def close(self) -> None:
        """Takes the store along: a killed controller cannot, and shared memory outlives processes."""
        self._store.close()
        for executor in (self._training, self._writing):
            executor.shutdown(wait=False, cancel_futures=True)

    async def step(self, batch: Batch) -> StepMetrics:
        return await self._train(lambda: self._trainer.step(batch))

    async def publish(self) -> int:
        version, tensors = await self._train(self._trainer.snapshot)
        await asyncio.get_running_loop().run_in_executor(self._writing, self._store.publish, version, tensors)
        return version

    async def save(self, path: str) -> None:
        await self._train(lambda: save_checkpoint(self._trainer, Path(path)))

    async def load(self, path: str) -> None:
        await self._train(lambda: load_checkpoint(self._trainer, Path(path)))

    async def _train(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._training, work)


@asynccontextmanager
async def build(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Handler]]:
    service = TrainerService(spec)
    await service.open()
    try:
        yield {name: getattr(service, name) for name in ("step", "publish", "save", "load")}
    finally:
        service.close()


if __name__ == "__main__":
    process.main(build)
