"""The services of one run, each where placement says: engines, trainer, environments and rewards.

Invariants: everything started here ends with the `async with`, however it is left. Lost engines and hosts are restarted
while the run goes on; a lost trainer ends `supervise` with TrainerLost, and `restart_trainer` starts it at the last
checkpoint.
"""

import asyncio
import shutil
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollart.agents.pool import AgentPool
from rollart.config import RunFile
from rollart.core.errors import ServiceError
from rollart.core.event_log import EventLog
from rollart.core.events import ServiceEnded
from rollart.core.types import Publication
from rollart.envs.pool import EnvironmentPool
from rollart.fleet.engine_supervisor import EngineSupervisor, engine_process
from rollart.fleet.judges import Judges, with_judges
from rollart.fleet.teachers import Teachers
from rollart.fleet.trainer_supervisor import TrainerSupervisor, trainer_commands
from rollart.gateway.client import Gateway
from rollart.gateway.limits import GatewayLimits
from rollart.hardware.roofline import ModelShape
from rollart.launch.launcher import Launcher, ServiceHandle
from rollart.launch.local import LocalLauncher
from rollart.models.chat import ChatRenderer
from rollart.placement.bindings import Binding
from rollart.placement.inventory import Inventory
from rollart.placement.plan import PlacementPlan, plan, with_plan, with_ranks
from rollart.placement.workload import MEASURED
from rollart.players.pool import PlayerPool, PlayerSetup, played_tasks, player_count
from rollart.rewards.invokers import Rewards
from rollart.rollout.decode_lengths import DecodeLengths
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.router import Router
from rollart.rollout.routing_policy import routing_policy
from rollart.rollout.training_loop import published
from rollart.training.client import TrainerClient, export_in_child
from rollart.weights.store import shared_folder

# Expected length of a task's completions by declared affinity, as a share of max_tokens, until measured.
_PRIORS = {"prefill": 0.1, "decode": 0.8}
RESPONSE_S = 86_400.0  # the clock of the episode comes first, and stands still in an outage


class Fleet:
    """`model` is the Hugging Face folder that RL starts from. The trainer starts at `version`, from its `checkpoint`
    unless that is 0; the engines start with `model` and get the version from the trainer. Without `rollouts` there is
    the trainer alone. A `launcher` that is given is closed with the fleet."""

    def __init__(
        self,
        run: RunFile,
        directory: Path,
        log: EventLog,
        *,
        model: Path,
        version: int = 0,
        checkpoint: Path | None = None,
        trainer: bool = True,
        registry: Callable[..., EngineRegistry] = EngineRegistry,
        rollouts: bool = True,
        launcher: Launcher | None = None,
    ) -> None:
        self._registry, self.rollouts, self._launcher = registry, rollouts, launcher
        self._asked = self._run = run  # `parallel: auto` is resolved in the latter
        self._log, self._train = log, trainer
        self._model = model.absolute()
        self._version, self._checkpoint = version, checkpoint
        self._logs = (directory / "logs").absolute()
        self._logs.mkdir(exist_ok=True)
        self._stack = AsyncExitStack()
        self._weights = weights_folder(run, directory)
        self.renderer = ChatRenderer(model, run.model.template_args)
        self.rewards: Rewards
        self.environments: EnvironmentPool
        self.agents: AgentPool | None = None
        self.teachers: Teachers | None = None
        self._gateway: Gateway | None = None
        self.players: PlayerPool | None = None
        self.router: Router
        self.priors: dict[str, float]  # expected tokens per turn of a task, until measured
        self._engines: EngineSupervisor
        self._trainer: TrainerSupervisor

    @property
    def trainer(self) -> TrainerClient:
        return self._trainer.client

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
        remove = partial(shutil.rmtree, self._weights, ignore_errors=True)
        remove()  # a killed run may have left some
        self._stack.callback(remove)
        launcher = self._launcher or make_launcher(self._run)
        self._stack.push_async_callback(launcher.close)
        placed = await placement_plan(self._run, launcher)
        self._asked, self._run = self._run, with_plan(self._run, placed)
        await self._start_judges(placed, launcher)
        self._build(placed, launcher)
        if not self.rollouts:
            await self._start_trainer()
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._start_pool(self.environments))
            group.create_task(self._start_pool(self.rewards))
            for pool in (self._gateway, self.agents, self.teachers, self.players):
                if pool is not None:
                    group.create_task(self._start_pool(pool))
            group.create_task(self._start_engines())
            if self._train:
                group.create_task(self._start_trainer())
        await self._engines.register(self._publish if self._train else None)

    async def _start_judges(self, placed: PlacementPlan, launcher: Launcher) -> None:
        """First of all: rewards and environments get their addresses."""
        run, judging = self._run, [binding for binding in placed.bindings if binding.role == "judge"]
        if judging and self.rollouts:
            judges = Judges(run, judging, launcher=launcher, logs=self._logs, sink=self._log)
            self._stack.push_async_callback(judges.close)
            await judges.start()
            self._run = run.model_copy(update={"tasks": [with_judges(task, judges.addresses) for task in run.tasks]})

    def _build(self, placed: PlacementPlan, launcher: Launcher) -> None:
        run, roles = self._run, {name: pool.role for name, pool in self._run.all_pools().items()}
        bindings = {role: [b for b in placed.bindings if roles[b.pool] == role] for role in set(roles.values())}
        self.rewards = Rewards(
            run.tasks, run.rewards, log=self._logs / "rewards.log", sink=self._log, cluster=run.cluster
        )
        self._build_agents(launcher, bindings["environment"])
        if self._train and (taught := bindings.get("teacher")):
            self.teachers = Teachers(
                run, taught, student=self._model, launcher=launcher, logs=self._logs, sink=self._log
            )
        self._build_environments(launcher, bindings["environment"])
        self._engines = EngineSupervisor(
            run,
            bindings["generate"],
            version=self._version,
            launcher=launcher,
            devices=run.device_classes(),
            shape=ModelShape.of_folder(self._model),
            spec=lambda: self._spec(0),
            sink=self._log,
            logs=self._logs,
            registry=self._registry,
        )
        self.priors = _priors(run, placed)
        self.router = make_router(run, self._engines.registry, self.priors)
        if self.rollouts and (count := player_count(run)):
            setup = PlayerSetup(run, count, self._model, self._logs, bindings["environment"])
            self.players = PlayerPool(setup, launcher=launcher, router=self.router, sink=self._log)
        self._trainer = TrainerSupervisor(
            run,
            bindings["train"],
            launcher=launcher,
            spec=self._trainer_spec,
            sink=self._log,
            logs=self._logs,
            smaller=partial(with_ranks, self._asked),
        )

    def _build_environments(self, launcher: Launcher, bindings: list[Binding]) -> None:
        """Of the tasks that players do not play: those have their own."""
        run = self._run
        elsewhere = played_tasks(run) if player_count(run) else frozenset()
        self.environments = EnvironmentPool(
            [task for task in run.tasks if task.agent is None and task.name not in elsewhere],
            run.environments,
            log=self._logs / "environments.log",
            launcher=launcher,
            requests=[binding.request() for binding in bindings if not run.all_pools()[binding.pool].urls],
            urls=[url for pool in run.pools_of("environment").values() for url in pool.urls],
            on_host_change=partial(self._report_host, bindings[0]),
            sink=self._log,
        )

    def _build_agents(self, launcher: Launcher, bindings: list[Binding]) -> None:
        run, tasks = self._run, [task for task in self._run.tasks if task.agent is not None]
        if not tasks:
            return
        patient = GatewayLimits(response_s=RESPONSE_S)
        self._gateway = Gateway(
            self._model,
            launcher,
            self._log,
            self._logs,
            limits=patient,
            template_args=self._run.model.template_args,
        )
        self.agents = AgentPool(
            tasks,
            self._gateway,
            launcher,
            processes=run.environments.processes,
            limits=run.environments.limits,
            log=self._logs / "agents.log",
            requests=[binding.request() for binding in bindings if not run.all_pools()[binding.pool].urls],
            on_host_change=partial(self._report_host, bindings[0]),
        )

    def _report_host(self, binding: Binding, host: ServiceHandle, ended: str | None) -> None:
        if ended is not None:
            self._log.emit(ServiceEnded(role="environment", name=host.name, reason=ended))
            return
        self._log.emit(binding.placed(host))

    def _spec(self, version: int) -> dict[str, Any]:
        spec = {"model": str(self._model), "weights": str(self._weights), "seed": self._run.seed, "version": version}
        lora = self._run.training.lora
        return spec | ({"lora": lora.model_dump(mode="json")} if self._train and lora else {})

    def _trainer_spec(self) -> dict[str, Any]:
        checkpoint = str(self._checkpoint.absolute()) if self._checkpoint else None
        return {**self._spec(self._version), "checkpoint": checkpoint}

    async def _start_pool(self, pool: EnvironmentPool | Rewards | Gateway | AgentPool | Teachers | PlayerPool) -> None:
        self._stack.push_async_callback(pool.close)
        await pool.start()

    async def _start_engines(self) -> None:
        self._stack.push_async_callback(self._engines.stop)
        await self._engines.start()

    async def _start_trainer(self) -> None:
        self._stack.push_async_callback(self._trainer.stop)
        await self._trainer.start()

    # While the run goes on

    async def supervise(self, trainer: bool = True) -> None:
        """Watch every service that is needed now. Never returns; raises when the run cannot go on as it is."""
        async with asyncio.TaskGroup() as group:
            if self._train and trainer:
                group.create_task(self._trainer.watch())
            if not self.rollouts:
                return
            group.create_task(self._engines.supervise())
            if self.teachers is not None:
                group.create_task(self.teachers.watch())
            if self.environments.capacity:
                group.create_task(self.environments.watch())
            if self.players is not None:
                group.create_task(self.players.watch())
            if self._gateway is not None and self.agents is not None:
                group.create_task(self._gateway.watch())
                group.create_task(self.agents.watch())

    async def restart_trainer(self, checkpoint: Path | None, version: int) -> Publication:
        """Restart the trainer at `version`, which the engines have to load next. Raises ServiceError."""
        self._version, self._checkpoint = version, checkpoint
        await self._trainer.restart()
        return await self._publish()

    async def export(self, checkpoint: Path, model: Path) -> None:
        """By the trainer, which has imported what it takes, or by a process of its own if the trainer is gone."""
        try:
            await self.trainer.export(checkpoint, model)
        except ServiceError:
            await export_in_child(checkpoint, model)

    async def _publish(self) -> Publication:
        clock = asyncio.get_running_loop().time
        began = clock()
        publication = await self.trainer.publish()
        self._log.emit(published(publication, clock() - began))
        return publication


def make_router(run: RunFile, registry: EngineRegistry, priors: Mapping[str, float]) -> Router:
    return Router(
        registry,
        policy=routing_policy(run.routing.policy, run.routing.disaggregate),
        affinity={
            task.name: task.affinity if isinstance(task.affinity, str) else tuple(task.affinity) for task in run.tasks
        },
        decode_lengths=DecodeLengths(priors),
        keeps_kv=run.engine.on_swap == "keep",
    )


def _priors(run: RunFile, placed: PlacementPlan) -> dict[str, float]:
    """Expected tokens per turn: as an earlier run measured them, or as the user declares."""
    measured = {task.task: task.shape.decode for task in placed.tasks if task.shape.source == MEASURED}
    declared = {task.name: (task.sampling.max_tokens, str(task.affinity)) for task in run.tasks}
    return {
        name: most * _PRIORS[affinity] for name, (most, affinity) in declared.items() if affinity in _PRIORS
    } | measured


def weights_folder(run: RunFile, directory: Path) -> Path:
    """The weight store of the run in `directory`."""
    return run.weights / run.name if run.weights else shared_folder(f"{run.name}-{directory.stat().st_ino}")


def make_launcher(run: RunFile) -> Launcher:
    if run.cluster is None:
        return LocalLauncher()
    from rollart.launch.ray import RayLauncher

    return RayLauncher(run.cluster)


async def expect_services(run: RunFile, launcher: LocalLauncher, logs: Path) -> None:
    """Spawn the engines and the trainer of a run whose model is still made: their imports take seconds."""
    placed = await placement_plan(run, launcher)
    run, pools = with_plan(run, placed), run.all_pools()
    by_role = {
        role: [b for b in placed.bindings if pools[b.pool].role == role and not b.url] for role in ("generate", "train")
    }
    for command in (
        *(engine_process(run, binding, logs) for binding in by_role["generate"]),
        *trainer_commands(run, by_role["train"], {}, logs),
    ):
        await launcher.expect(command)


async def placement_plan(run: RunFile, launcher: Launcher) -> PlacementPlan:
    nodes = tuple(await launcher.nodes())
    where = f"the cluster {run.cluster}" if run.cluster else "this machine"
    return plan(run, Inventory(nodes, where, overcommit=run.cluster is None))
