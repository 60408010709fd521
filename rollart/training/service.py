"""The trainer as a service: `python -m rollart.training.service`.

Invariants: everything that touches the trainer runs in one thread, in the order of the calls, so a step never overlaps
a publication or the copy that a save makes; the event loop only waits, so the service responds while a step runs.
`publish` writes straight from the weights to where engines read them, as fast as a copy would be, and returns when all
is written. `save` returns when the state is copied; `saved` waits until the files are on disk.

Each rank is one such process, with `{"rank": 1, "ranks": 2, "address": "host:port of rank 0"}` in the spec, as its
`group`. Rank 0 is the trainer. The others serve no methods: their thread carries out the orders of rank 0. A rank
reports its own address only when all have joined. When the ranks are out of step, or one is gone, the others exit at
once with code 1, from the thread that noticed, so that no collective can block them.
"""

import asyncio
import ctypes
import os
import select
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from rollart.config import AlgorithmConfig, TrainingConfig
from rollart.core.types import Batch, ExampleBatch, Publication, StepMetrics
from rollart.hardware.host_stats import processor
from rollart.launch import service
from rollart.launch.rpc import Handler
from rollart.training.checkpoint import CheckpointFailed, load_checkpoint, save_checkpoint
from rollart.training.export import export_model
from rollart.training.learner import Heartbeat, Learner, Shutdown
from rollart.training.ranks import HEARTBEAT_SECONDS, RankAddress, Ranks, RanksLost
from rollart.training.trainer import Trainer
from rollart.weights.publish import Publisher, new_id
from rollart.weights.server import WeightServer
from rollart.weights.store import Store
from rollart.weights.transports import sender
from rollart.weights.transports.offers import SenderGroup

T = TypeVar("T")
Sources = tuple[tuple[str, ...], ...]
SHUTDOWN_DEADLINE = 1.0
END_GRACE = 0.5
METHODS = ("step", "compare", "imitate", "publish", "save", "saved", "load", "export", "describe")
# M_TRIM_THRESHOLD, M_MMAP_THRESHOLD (its maximum) and M_ARENA_MAX: one heap, of which 256 MB may be free.
MALLOC_OPTIONS = {-1: 256 << 20, -3: 32 << 20, -8: 1}
_FLAGS = ("MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "CUBLAS_WORKSPACE_CONFIG")


class TrainerService:
    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._store = Store(Path(spec["weights"]))
        self._sources: Sources = ()
        self._training = ThreadPoolExecutor(1, "trainer")
        self._heartbeats: asyncio.Task[None] | None = None
        self._publisher: Publisher | None = None
        self._saving: Future[None] = Future()
        self._trainer: Trainer
        self._computes_with: dict[str, str] = {}

    async def open(self) -> None:
        def build() -> Trainer:
            spec, config = self._spec, _config(self._spec)
            ranks, self._publisher, self._sources = _join(spec, config, self._store)
            self._computes_with = computes_with(ranks)
            trainer = Trainer(
                Path(spec["model"]),
                config,
                seed=spec["seed"],
                version=spec["version"],
                ranks=ranks,
                engine_dtype=spec.get("engine_dtype", "float32"),
                publisher=self._publisher,
                tasks=_tasks(spec),
            )
            if spec.get("checkpoint"):
                load_checkpoint(trainer, Path(spec["checkpoint"]))
            return trainer

        self._trainer = await self._train(build)
        if self._trainer.ranks.size > 1:
            self._heartbeats = asyncio.create_task(self._send_heartbeats())

    async def close(self) -> None:
        """Deletes the weight store too: a killed controller cannot, and shared memory outlives processes."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            await self._shutdown_ranks()
        if self._publisher is not None:
            self._publisher.close()
        self._store.close()
        self._training.shutdown(wait=False, cancel_futures=True)

    async def step(self, batch: Batch) -> StepMetrics:
        return await self._train(lambda: self._trainer.step(batch))

    async def compare(self, batch: Batch) -> dict[str, float]:
        return await self._train(lambda: self._trainer.compare(batch))

    async def imitate(self, batch: ExampleBatch) -> StepMetrics:
        return await self._train(lambda: self._trainer.imitate(batch))

    async def publish(self) -> Publication:
        id = new_id()
        version, digests = await self._train(lambda: self._trainer.publish(id))
        bytes = self._trainer.model_bytes
        return Publication(version, id, self._sources, self._spec.get("key"), bytes, digests=digests)

    async def describe(self) -> dict[str, str]:
        return self._computes_with

    async def save(self, path: str) -> None:
        try:
            self._saving = await self._train(lambda: save_checkpoint(self._trainer, Path(path)))
        except CheckpointFailed as error:
            self._saving = Future()
            self._saving.set_exception(error)

    async def saved(self) -> str:
        try:
            await asyncio.wrap_future(self._saving)
        except CheckpointFailed as error:
            return str(error)
        return ""

    async def load(self, path: str) -> None:
        await self._train(lambda: load_checkpoint(self._trainer, Path(path)))

    async def export(self, paths: tuple[str, str]) -> None:
        """A checkpoint as a Hugging Face folder."""
        checkpoint, folder = map(Path, paths)
        await asyncio.to_thread(export_model, checkpoint, folder)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await self._train(lambda: self._trainer.notify(Heartbeat()))

    async def _shutdown_ranks(self) -> None:
        """A clean exit of the other ranks, unless a step is running or they are gone already."""
        shutdown = asyncio.get_running_loop().run_in_executor(self._training, self._trainer.notify, Shutdown())
        await asyncio.wait({shutdown}, timeout=SHUTDOWN_DEADLINE)
        if shutdown.done():
            shutdown.exception()

    async def _train(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._training, _exit_if_lost, work)


async def _follow(spec: dict[str, Any], thread: ThreadPoolExecutor) -> None:
    """Returns when this rank follows rank 0, in `thread`."""
    config = _config(spec)

    def build() -> Learner:
        ranks, publisher, _ = _join(spec, config, Store(Path(spec["weights"])))
        computes_with(ranks)
        return Learner(Path(spec["model"]), config, ranks, spec["seed"], publisher, _tasks(spec))

    def follow() -> None:
        _exit_if_lost(learner.follow)
        signal.raise_signal(signal.SIGTERM)  # rank 0 exited normally, so this one does

    learner = await asyncio.get_running_loop().run_in_executor(thread, build)
    thread.submit(follow)


def _config(spec: Mapping[str, Any]) -> TrainingConfig:
    return TrainingConfig.model_validate(spec["config"])


def _tasks(spec: Mapping[str, Any]) -> dict[str, AlgorithmConfig]:
    """The algorithms of tasks that have one of their own."""
    return {task: AlgorithmConfig.model_validate(own) for task, own in spec.get("tasks", {}).items()}


def _rank_address(spec: Mapping[str, Any]) -> RankAddress:
    """From `group`, or from what a launcher adds to the specs of ranks. Without either, a single rank."""
    if "rendezvous" in spec:
        return RankAddress(spec["rank"], spec["world"], spec["rendezvous"])
    return msgspec.convert(spec.get("group") or {"rank": 0, "ranks": 1, "address": ""}, RankAddress)


def _join(spec: Mapping[str, Any], config: TrainingConfig, store: Store) -> tuple[Ranks, Publisher, Sources]:
    """The ranks, this one's publisher, and where each rank serves its shard to engines on other machines. Raises
    TransferFailed if the transport of the run file is not available here."""
    address = _rank_address(spec)
    layout = config.parallel.layout(address.ranks)
    device = service.torch_device(config.device, spec)
    ranks = Ranks.join(address, device, patience=config.deadline, layout=layout)
    server = WeightServer(store, spec.get("bind", service.LOOPBACK), spec.get("key"))
    sources = tuple((url,) for url in ranks.all_gather_text("weights", server.url))
    senders = [] if config.transport == "http" else [SenderGroup([sender(config.transport)], server.offer)]
    publisher = Publisher(store, shard=ranks.rank, shards=ranks.size, dtype=spec.get("engine_dtype"), senders=senders)
    return ranks, publisher, sources


def computes_with(ranks: Ranks) -> dict[str, str]:
    """What decides the last bits of a result, on all ranks; the run file has the rest. All ranks call it."""
    cuda = ranks.device.type == "cuda"
    here = {
        "torch": str(torch.__version__),
        "transformers": metadata.version("transformers"),
        "device": torch.cuda.get_device_name(ranks.device) if cuda else processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()).lower(),
        **{name: os.environ[name] for name in _FLAGS if name in os.environ},
    }
    texts = ranks.all_gather_text("computes with", msgspec.json.encode(here).decode())
    every = [msgspec.json.decode(text) for text in texts]
    names = dict.fromkeys(name for one in every for name in one)
    return {name: ", ".join(dict.fromkeys(one.get(name, "") for one in every)) for name in names}


def _exit_if_lost(work: Callable[[], T]) -> T:
    """Do `work`; if the ranks have lost each other, exit: only a restart helps."""
    try:
        return work()
    except RanksLost as error:
        if select.select([sys.stdin], [], [], END_GRACE)[0]:
            raise  # no failure: ranks are shut down one after the other, and this one is next
        # Not a normal exit, which would wait for threads that wait for ranks that are gone.
        traceback.print_exception(error)
        os._exit(1)


@asynccontextmanager
async def build(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Handler]]:
    if (path := spec.get("path")) and path not in sys.path:
        sys.path.append(path)  # losses and advantages of the user may be in the folder that the run was started in
    if _rank_address(spec).rank > 0:
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
        yield {name: getattr(service, name) for name in METHODS}
    finally:
        await service.close()


def _keep_freed_memory() -> None:
    """The C library gives back to the system what a pass has freed, and the next pass waits for the same pages to be
    cleared again: a tenth of its time with small models. Settings are those of glibc; others ignore them."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    for option, value in MALLOC_OPTIONS.items():
        mallopt(option, value)


if __name__ == "__main__":
    _keep_freed_memory()
    service.main(build)
