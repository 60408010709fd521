"""The process of a player: `python -m rollart.players.service`."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from rollart.config import EnvironmentsConfig, RunFile
from rollart.core import gc_tuning
from rollart.core.errors import RollartError
from rollart.core.events import ServiceEnded
from rollart.envs.pool import EnvironmentPool
from rollart.launch import service
from rollart.launch.launcher import Launcher, ServiceHandle
from rollart.launch.local import LocalLauncher
from rollart.models.chat import ChatRenderer
from rollart.placement.bindings import Binding
from rollart.players.link import Link
from rollart.players.player import ControllerLine, Player, PlayerRouter
from rollart.players.pool import played_tasks
from rollart.rewards.invokers import Rewards


def share_of(config: EnvironmentsConfig, players: int) -> EnvironmentsConfig:
    """What one of them may have."""
    counts = {name: ceil(getattr(config, name) / players) for name in ("processes", "hedges", "warm")}
    return config.model_copy(update=counts)


def _launcher(run: RunFile) -> Launcher:
    if run.cluster is None:
        return LocalLauncher()
    from rollart.launch.ray import RayLauncher

    return RayLauncher(run.cluster)


def _report_host(line: ControllerLine, binding: Sequence[Binding], host: ServiceHandle, ended: str | None) -> None:
    if ended is not None:
        line.emit(ServiceEnded(role="environment", name=host.name, reason=ended))
    for each in binding if ended is None else ():
        line.emit(each.placed(host))


@asynccontextmanager
async def serve(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
    """Accepts one connection, that of the controller."""
    gc_tuning.collect_rarely()
    run, players = RunFile.model_validate(spec["run"]), int(spec["players"])
    log = Path(spec["logs"]) / spec["name"]
    sys.path[:] = spec["path"]
    bindings = msgspec.convert(spec["bindings"], tuple[Binding, ...])
    started = [binding for binding in bindings if not run.all_pools()[binding.pool].urls]
    # The player is made with the line, and the link only calls it later.
    link = Link(lambda frame: player.receive(frame), lambda reason: os.kill(os.getpid(), signal.SIGTERM))
    line, launcher, tasks = ControllerLine(link.send, link.send_later), _launcher(run), played_tasks(run)
    environments = EnvironmentPool(
        [task for task in run.tasks if task.name in tasks],
        share_of(run.environments, players),
        log=log.with_suffix(".environments.log"),
        launcher=launcher,
        requests=[replace(each.request(), count=each.units / players) for each in started],
        urls=[url for pool in run.pools_of("environment").values() for url in pool.urls],
        on_host_change=partial(_report_host, line, started[:1]),
        sink=line,
    )
    workers = run.rewards.model_copy(update={"workers": ceil(run.rewards.workers / players)})
    player = Player(
        line=line,
        router=PlayerRouter(line, run.engine.deadline),
        environments=environments,
        renderer=ChatRenderer(Path(spec["model"]), run.model.template_args),
        rewards=Rewards(run.tasks, workers, log=log.with_suffix(".rewards.log"), sink=line, cluster=run.cluster),
        in_use=lambda: environments.in_use,
    )
    async with AsyncExitStack() as stack:
        for part in (launcher, environments, player.rewards, player.router, player):
            stack.push_async_callback(part.close)
        try:
            await asyncio.gather(environments.start(), player.rewards.start())
        except RollartError as error:
            print(json.dumps({"error": str(error)}), flush=True)
            raise
        server = await asyncio.get_running_loop().create_unix_server(lambda: link, spec["socket"])
        stack.callback(server.close)
        reporting = asyncio.create_task(player.report())
        stack.callback(reporting.cancel)
        yield {"socket": spec["socket"]}


if __name__ == "__main__":
    service.run_service(serve, loop=uvloop.new_event_loop)
