"""The trainer of a run: one service, or several ranks, started together and restarted together.

Invariants: all ranks run with one layout. A restart asks for all ranks of the run file first; only when there was no
room for them for a while does it take fewer, in a layout that suits those: any layout loads the checkpoint.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollart.config import RunFile
from rollart.core.errors import ServiceError
from rollart.core.events import EventSink, ServiceEnded, Warned
from rollart.launch import rpc
from rollart.launch.launcher import (
    Command,
    Launcher,
    ResourceRequest,
    ServiceHandle,
    service_command,
    service_started,
)
from rollart.models.folder import read_seconds
from rollart.placement.bindings import Binding
from rollart.training.client import TrainerClient, TrainerLost

RESTART_S, MAX_BACKOFF_S = 180.0, 15.0
WHOLE_S = 20.0  # in which a restart asks for all ranks: a replacement of a lost node joins
REASON_S = 10.0


class TrainerSupervisor:
    """`spec` is what every rank needs, for the checkpoint that it starts from."""

    def __init__(
        self,
        run: RunFile,
        bindings: Sequence[Binding],
        *,
        launcher: Launcher,
        spec: Callable[[], dict[str, Any]],
        sink: EventSink,
        logs: Path,
        smaller: Callable[[int], RunFile | None] = lambda ranks: None,
    ) -> None:
        """`smaller` is the run file for fewer ranks, if they can train its model."""
        self._all, self._smaller = (run, bindings), smaller
        self._run, self._bindings, self._launcher, self._sink = run, bindings, launcher, sink
        self._spec, self._logs = spec, logs
        self._started: Sequence[ServiceHandle] = ()
        self._stack = AsyncExitStack()
        self._connection: rpc.RpcClient
        self.client: TrainerClient

    async def start(self, avoid: frozenset[str] = frozenset()) -> None:
        """Raises ServiceError."""
        clock = asyncio.get_running_loop().time
        began = clock()
        spec = {
            **self._spec(),
            "config": self._run.training.model_dump(mode="json"),
            "tasks": {task.name: task.algorithm.model_dump(mode="json") for task in self._run.tasks if task.algorithm},
            "engine_dtype": self._run.engine.dtype,
            "path": str(Path.cwd()),
            "classes": self._bindings[0].choices,
        }
        folders = [Path(spec[key]) for key in ("model", "checkpoint") if spec.get(key)]
        commands = [
            replace(
                command,
                start_deadline=self._run.training.start_deadline + read_seconds(*folders),
                start_key="training.start_deadline",
            )
            for command in trainer_commands(self._run, self._bindings, spec, self._logs)
        ]
        request = ResourceRequest(self._bindings[0].choices, self._bindings[0].units, avoid)
        if len(commands) == 1:
            self._started = [await self._launcher.launch(commands[0], request)]
        else:
            self._started = await self._launcher.launch_together(commands, request)
        url = str(self._started[0].answer["url"])
        try:
            client = await self._stack.enter_async_context(rpc.connected(url, key=self._launcher.key))
        except BaseException:
            await self.stop()
            raise
        self._connection = client
        self.client = TrainerClient(client, self._run.training.deadline)
        details = await self._details(spec)
        for binding, started in zip(self._bindings, self._started, strict=True):
            self._sink.emit(service_started("train", started.name, started, clock() - began, details))
            self._sink.emit(binding.placed(started))
            details = {}

    async def _details(self, spec: Mapping[str, Any]) -> dict[str, str]:
        """What decides the weights, besides the batches."""
        return {
            "ranks": str(len(self._bindings)),
            "model": str(spec["model"]),
            "seed": str(spec["seed"]),
            "engine_dtype": self._run.engine.dtype,
            "config": self._run.training.model_dump_json(),
            "tasks": json.dumps(spec["tasks"]),
            **await self.client.describe(),
        }

    async def watch(self) -> None:
        """Raises TrainerLost as soon as one rank has ended, which leaves the others with nothing to do, or when the
        connection is lost and no process has ended for a while."""
        waits = [asyncio.ensure_future(wait) for wait in (*(one.wait() for one in self._started), self._silent())]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in waits:
                waiting.cancel()
        reason = done.pop().result()
        self._sink.emit(ServiceEnded(role="train", name="trainer", reason=reason))
        raise TrainerLost(reason)

    async def _silent(self) -> str:
        reason = await self._connection.lost()
        await asyncio.sleep(REASON_S)
        return reason

    async def restart(self) -> None:
        """Start from the checkpoint that `spec` names now, first without the nodes that went silent. Retries for
        `RESTART_S`, because a node with room may join meanwhile. Raises ServiceError."""
        clock = asyncio.get_running_loop().time
        silent = frozenset(started.node for started in self._started if started.node_lost)
        for started in self._started:
            started.kill()  # an orderly end would remove the weight store, which the engines still need
        await self.stop()
        self._run, self._bindings = self._all
        began, backoff = clock(), 1.0
        deadline = began + RESTART_S
        while True:
            try:
                return await self.start(silent)
            except ServiceError as error:
                if clock() + backoff > deadline:
                    raise
                self._sink.emit(Warned(message=f"the trainer is not back yet: {error}"))
            await asyncio.sleep(backoff)
            silent, backoff = frozenset(), min(MAX_BACKOFF_S, backoff * 2)
            if clock() - began > WHOLE_S:
                self._shrink()

    def _shrink(self) -> None:
        """The next smaller number of ranks that can train the model; all of them again after the smallest."""
        for ranks in range(len(self._bindings) - 1, 0, -1):
            if run := self._smaller(ranks):
                self._run, self._bindings = run, self._all[1][:ranks]
                layout = run.training.parallel.layout(ranks)
                self._sink.emit(
                    Warned(message=f"the trainer goes on with {ranks} of {len(self._all[1])} ranks: {layout}")
                )
                return
        self._run, self._bindings = self._all

    async def stop(self) -> None:
        await self._stack.aclose()
        self._stack = AsyncExitStack()
        await asyncio.gather(*(started.stop() for started in self._started))


def trainer_commands(
    run: RunFile, bindings: Sequence[Binding], spec: Mapping[str, Any], logs: Path
) -> Sequence[Command]:
    """Of all ranks."""
    names = ["trainer"] if len(bindings) == 1 else [binding.worker for binding in bindings]
    threads = run.training.thread_count
    return [service_command("rollart.training.service", spec, name=name, logs=logs, threads=threads) for name in names]
