"""The services of one run on this machine: engines and trainer as child processes, environments and rewards as pools.

Invariants: everything started here ends with the `async with`, however it is left; an engine that dies, or that the
router gave up, is killed and started again, at most `_RESTARTS` times in all, and serves only once it has the newest
weights; a trainer that dies ends the run, which `--resume` continues from its last checkpoint.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollart.chat import ChatRenderer
from rollart.config import RunFile
from rollart.engines.client import EngineClient
from rollart.envs.pool import EnvironmentPool
from rollart.errors import EngineFailed, EngineLost, ServiceError
from rollart.observe.events import EngineSample, EventLog, ServiceEnded, ServiceStarted, Warned
from rollart.resources import local
from rollart.rewards.pool import RewardPool
from rollart.rollout.router import Router
from rollart.services import rpc
from rollart.training.client import TrainerClient
from rollart.weights.store import WeightStore

_RESTARTS = 3
_SAMPLE_SECONDS = 1.0


class Fleet:
    """`model` is the folder that engines and trainer start from, holding policy version `version`."""

    def __init__(
        self, run: RunFile, directory: Path, log: EventLog, *, model: Path, version: int, trainer: bool = True
    ) -> None:
        self._run, self._log, self._train = run, log, trainer
        self._model, self._version = model, version
        self._logs = directory / "logs"
        self._logs.mkdir(exist_ok=True)
        self._stack = AsyncExitStack()
        self._engines: dict[str, EngineClient] = {}
        self._restarts = 0
        self.store = WeightStore.shared(f"{run.name}-{directory.stat().st_ino}")
        self.renderer = ChatRenderer(model)
        self.environments = EnvironmentPool(run.tasks, run.environments, log=self._logs / "environments.log")
        self.rewards = RewardPool(run.tasks, run.rewards, log=self._logs / "rewards.log")
        self.router: Router
        self.trainer: TrainerClient
        self._trainer_process: local.ServiceProcess
        self._engine_processes: dict[str, local.ServiceProcess] = {}

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        self.store.clear()  # what a killed run may have left
        self._stack.callback(self.store.close)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._start_pool(self.environments))
            group.create_task(self._start_pool(self.rewards))
            for number in range(self._run.engine.count):
                group.create_task(self._start_engine(f"engine-{number}"))
            if self._train:
                group.create_task(self._start_trainer())
        self.router = Router(
            dict(self._engines), self._version, self._log, on_lost=lambda name: self._engine_processes[name].kill()
        )

    async def _start_pool(self, pool: EnvironmentPool | RewardPool) -> None:
        self._stack.push_async_callback(pool.close)
        await pool.start()

    async def _start_trainer(self) -> None:
        process = await self._launch(
            "rollart.training.service",
            {"config": self._run.training.model_dump(mode="json"), "checkpoint": self._checkpoint()},
            role="train",
            name="trainer",
            threads=self._run.training.threads,
        )
        self._trainer_process = process
        client = await self._stack.enter_async_context(rpc.connected(process.url))
        self.trainer = TrainerClient(client, self._run.training.deadline)

    def _checkpoint(self) -> str | None:
        return str(self._model) if self._version else None

    async def _start_engine(self, name: str) -> None:
        """At the version that the run began with: its weights are in the model folder, never retired."""
        process = await self._launch(
            "rollart.engines.service",
            {"config": self._run.engine.model_dump(mode="json")},
            role="generate",
            name=name,
            threads=self._run.engine.threads,
        )
        client = await self._stack.enter_async_context(rpc.connected(process.url))
        self._engine_processes[name] = process
        self._engines[name] = EngineClient(client, deadline=self._run.engine.deadline)

    async def _launch(
        self, module: str, spec: dict[str, Any], *, role: str, name: str, threads: int
    ) -> local.ServiceProcess:
        clock = asyncio.get_running_loop().time
        began = clock()
        whole = {
            "model": str(self._model),
            "weights": str(self.store.root),
            "seed": self._run.seed,
            "version": self._version,
        } | spec
        process = await local.launch(module, whole, name=name, logs=self._logs, threads=threads)
        self._stack.push_async_callback(process.stop)
        self._log.emit(ServiceStarted(role=role, name=name, pid=process.process.pid, seconds=clock() - began))
        return process

    # While the run goes on

    def retire(self, loaded: int) -> None:
        """Every engine has `loaded`; older weights are of no use."""
        self.store.retire(keep={loaded})

    async def supervise(self) -> None:
        """Watch every service; returns never, raises when the run cannot go on."""
        async with asyncio.TaskGroup() as group:
            if self._train:
                group.create_task(self._watch_trainer())
            for name in self._engines:
                group.create_task(self._watch_engine(name))
                group.create_task(self._sample(name))

    async def _watch_trainer(self) -> None:
        reason = await self._trainer_process.wait()
        self._log.emit(ServiceEnded(role="train", name="trainer", reason=reason))
        raise ServiceError(f"{reason}\nThe run stopped; `rollart train ... --resume` goes on from the last checkpoint")

    async def _watch_engine(self, name: str) -> None:
        while True:
            reason = await self._engine_processes[name].wait()
            self._log.emit(ServiceEnded(role="generate", name=name, reason=reason))
            self.router.lost(name, reason)
            self._restarts += 1
            if self._restarts > _RESTARTS:
                raise ServiceError(f"engines ended {self._restarts} times, the last: {reason}")
            await self._start_engine(name)
            version = self._version
            while version != self.router.target:  # it may move while we load
                version = self.router.target
                await self._engines[name].load(version)
            self.router.replace(name, self._engines[name], version)

    async def _sample(self, name: str) -> None:
        while True:
            try:
                status = await self._engines[name].status()
            except EngineLost:
                pass  # its watcher tells, and starts it again
            except EngineFailed as error:
                self._log.emit(Warned(message=f"{name} did not tell its status: {error}"))
            else:
                self._log.emit(
                    EngineSample(
                        engine=name,
                        version=status.version,
                        running=status.running,
                        waiting=status.waiting,
                        kv_bytes=status.kv_bytes,
                        prefilled=status.prefilled,
                        generated=status.generated,
                        busy_s=status.busy_s,
                    )
                )
            await asyncio.sleep(_SAMPLE_SECONDS)
