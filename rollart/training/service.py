"""The trainer as a service of its own process: `python -m rollart.training.service`.

Invariants: everything that touches the trainer runs in one thread, in the order of the calls, so a step never overlaps
a save or a publication; the event loop only waits, so the service answers while a step runs. `publish` writes straight
from the weights to where engines read them, which is as fast as a copy of them would be, and answers when all is there.

Several ranks are as many such processes, each with `{"rank": 1, "ranks": 2, "address": "host:port of rank 0"}` in the
spec, as its `group`. Rank 0 is the trainer. The others serve no methods: their thread does what rank 0 orders. Each
tells its own address only when all have met. When the ranks are out of step, or one is gone, the others end at once
with exit code 1, from whatever thread noticed, so that no collective can hold them up.
"""

import asyncio
import os
import select
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollart.config import TrainingConfig
from rollart.core.types import Batch, Publication, StepMetrics
from rollart.launch import service
from rollart.launch.rpc import Handler
from rollart.training.checkpoint import load_checkpoint, save_checkpoint
from rollart.training.learner import Learner
from rollart.training.ranks import BEAT_SECONDS, RankAddress, Ranks, RanksLost
from rollart.training.trainer import Trainer
from rollart.weights.publish import Publisher, new_id
from rollart.weights.server import WeightServer
from rollart.weights.store import Store
from rollart.weights.transports import sender
from rollart.weights.transports.offers import SenderGroup

T = TypeVar("T")
FAREWELL_DEADLINE = 1.0
END_GRACE = 0.5


class TrainerService:
    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._store = Store(Path(spec["weights"]))
        self._sources: tuple[tuple[str, ...], ...] = ()
        self._training = ThreadPoolExecutor(1, "trainer")
        self._pulse: asyncio.Task[None] | None = None
        self._publisher: Publisher | None = None
        self._trainer: Trainer

    async def open(self) -> None:
        def build() -> Trainer:
            spec, config = self._spec, _config(self._spec)
            ranks = _join(spec, config)
            server = _serve(self._store, spec)
            self._sources = _sources(ranks, server)
            self._publisher = _publisher(self._store, spec, ranks, server)
            trainer = Trainer(
                Path(spec["model"]),
                config,
                seed=spec["seed"],
                version=spec["version"],
                ranks=ranks,
                engine_dtype=spec.get("engine_dtype", "float32"),
                publisher=self._publisher,
            )
            if spec.get("checkpoint"):
                load_checkpoint(trainer, Path(spec["checkpoint"]))
            return trainer

        self._trainer = await self._train(build)
        if self._trainer.ranks.size > 1:
            self._pulse = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """Takes the store along: a killed controller cannot, and shared memory outlives processes."""
        if self._pulse is not None:
            self._pulse.cancel()
            await self._farewell()
        if self._publisher is not None:
            self._publisher.close()
        self._store.close()
        self._training.shutdown(wait=False, cancel_futures=True)

    async def step(self, batch: Batch) -> StepMetrics:
        return await self._train(lambda: self._trainer.step(batch))

    async def publish(self) -> Publication:
        id = new_id()
        version = await self._train(lambda: self._trainer.publish(id))
        return Publication(version, id, self._sources, self._spec.get("key"))

    async def save(self, path: str) -> None:
        await self._train(lambda: save_checkpoint(self._trainer, Path(path)))

    async def load(self, path: str) -> None:
        await self._train(lambda: load_checkpoint(self._trainer, Path(path)))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await self._train(self._trainer.beat)

    async def _farewell(self) -> None:
        """The others hear that this is no accident, unless a step is under way or they have gone already."""
        saying = asyncio.get_running_loop().run_in_executor(self._training, self._trainer.end)
        await asyncio.wait({saying}, timeout=FAREWELL_DEADLINE)
        if saying.done():
            saying.exception()

    async def _train(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._training, _in_step, work)


async def _follow(spec: dict[str, Any], thread: ThreadPoolExecutor) -> None:
    """Returns when this rank is ready to follow, in `thread`."""
    config = _config(spec)

    def build() -> Learner:
        ranks, store = _join(spec, config), Store(Path(spec["weights"]))
        server = _serve(store, spec)
        _sources(ranks, server)
        publisher = _publisher(store, spec, ranks, server)
        return Learner(Path(spec["model"]), config, ranks, spec["seed"], publisher)

    def follow() -> None:
        _in_step(learner.follow)
        signal.raise_signal(signal.SIGTERM)  # rank 0 ended in order, so this one does

    learner = await asyncio.get_running_loop().run_in_executor(thread, build)
    thread.submit(follow)


def _config(spec: Mapping[str, Any]) -> TrainingConfig:
    return TrainingConfig.model_validate(spec["config"])


def _place(spec: Mapping[str, Any]) -> RankAddress:
    """From `group`, or from what a launcher tells those that it starts together. Without either, alone."""
    if "rendezvous" in spec:
        return RankAddress(spec["rank"], spec["world"], spec["rendezvous"])
    return msgspec.convert(spec.get("group") or {"rank": 0, "ranks": 1, "address": ""}, RankAddress)


def _join(spec: Mapping[str, Any], config: TrainingConfig) -> Ranks:
    return Ranks.join(_place(spec), service.torch_device(config.device, spec), patience=config.deadline)


def _publisher(store: Store, spec: Mapping[str, Any], ranks: Ranks, server: WeightServer) -> Publisher:
    """Raises TransferFailed if the transport of the run file cannot be had here."""
    transport, dtype = _config(spec).transport, spec.get("engine_dtype")
    senders = [] if transport == "http" else [SenderGroup([sender(transport)], server.offer)]
    return Publisher(store, shard=ranks.rank, shards=ranks.size, dtype=dtype, senders=senders)


def _serve(store: Store, spec: Mapping[str, Any]) -> WeightServer:
    """For engines on other hosts; it ends with the process."""
    return WeightServer(store, spec.get("bind", service.LOOPBACK), spec.get("key"))


def _sources(ranks: Ranks, server: WeightServer) -> tuple[tuple[str, ...], ...]:
    """Where each rank's shard is to be had."""
    return tuple((url,) for url in ranks.told("weights", server.url))


def _in_step(work: Callable[[], T]) -> T:
    """Do `work`; if the ranks have lost each other, this process is of no more use."""
    try:
        return work()
    except RanksLost as error:
        if _told_to_end():
            raise
        # Without the ceremonies of a normal exit: they would wait for threads that wait for ranks that are gone.
        traceback.print_exception(error)
        os._exit(1)


def _told_to_end() -> bool:
    """Ranks that are told to end do so one after the other, which is no failure: this one's turn comes at once."""
    return bool(select.select([sys.stdin], [], [], END_GRACE)[0])


@asynccontextmanager
async def build(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Handler]]:
    if (path := spec.get("path")) and path not in sys.path:
        sys.path.append(path)  # losses and advantages of the user may be in the folder that the run was started in
    if _place(spec).rank > 0:
        thread = ThreadPoolExecutor(1, "rank")
        try:
            await _follow(spec, thread)
            yield {}
        finally:
            thread.shutdown(wait=False)
        return
    service = TrainerService(spec)
    try:
        await service.open()
        yield {name: getattr(service, name) for name in ("step", "publish", "save", "load")}
    finally:
        await service.close()


if __name__ == "__main__":
    service.main(build)
