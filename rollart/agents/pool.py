"""Agents: programs that drive themselves, each episode in a process of its own that can be killed.

The invariants:
- An episode is one process, forked for it and ended with it, and one key at the gateway, valid for as long.
- However an episode ends, `captured` is called once with what was sampled, unless the gateway itself was lost.
- A failure of the program is EnvironmentFailed; after a failure of the engines it is EngineFailed. A
  program that raises because a limit refused its request or cut its last response has not failed: the episode is
  truncated. A missing reward is RewardFailed. No failure becomes a reward.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from rollart.config import AgentConfig, ProcessLimitsConfig, RewardConfig, TaskConfig
from rollart.core.endpoint import AgentEpisode
from rollart.core.errors import ConfigError, EngineFailed, EnvironmentFailed, RewardFailed, ServiceError
from rollart.core.events import GatewaySample
from rollart.core.foreign import InvalidValue, Verdict, parse_verdict
from rollart.core.protocols import Generate, TokenStream
from rollart.core.types import CapturedEpisode, Completion, GenerationRequest, Sampling, Step
from rollart.envs import families
from rollart.gateway.client import Gateway
from rollart.gateway.limits import EpisodeLimits
from rollart.launch.launcher import Launcher, ResourceRequest
from rollart.workers.host_handle import HostLocation, HostSpec
from rollart.workers.pool import ProcessClaim, ProcessPool
from rollart.workers.pool_host import HostCallback
from rollart.workers.worker_process import CallRaised, ProcessLost

_LIMITS = ProcessLimitsConfig()
MAX_EPISODE_S = 7 * 86_400.0  # the caller's clock comes first; it stands still while no engine can serve


@dataclass(frozen=True, slots=True)
class Driver:
    """What plays the episodes of a task: the class `target`, in the forked process, standard library only, with

        def run(self, agent, endpoint: dict, episode: dict) -> dict

    `agent` is the task's agent, as JSON; `endpoint` and `episode` are the fields of `Endpoint` and `AgentEpisode`. It
    returns `reward`, `success` and `info`, all optional, and raises if the program fails. `imports` are loaded once, in
    the host, before episodes are forked.
    """

    target: str
    agent: Any
    imports: tuple[str, ...] = ()


def driver_of(task: TaskConfig) -> Driver:
    if task.agent is None:
        raise ConfigError(f"task {task.name!r} has no agent")
    if task.agent.function is not None:
        return Driver("{rollart}/agents/function.py:FunctionAgent", task.agent.function, (task.agent.function,))
    return Driver("{rollart}/agents/command.py:CommandAgent", command_of(task, task.agent))


def command_of(task: TaskConfig, agent: AgentConfig) -> dict[str, Any]:
    """The arguments of `CommandAgent`. If the task has a family, its Python is first in PATH."""
    family = families.installed(task.family) if task.family else None
    return {
        "command": agent.command,
        "files": None if agent.files is None else str(agent.files.absolute()),
        "mounts": [str(path.absolute()) for path in agent.mounts] + (family.mounts if family else []),
        "path": [str(family.python.parent)] if family else [],
        "limits": agent.limits,
        "image": agent.image,
        "deadline": MAX_EPISODE_S,
    }


def host_spec(task: TaskConfig, limits: ProcessLimitsConfig, log: Path | None = None) -> HostSpec:
    """Raises ConfigError if the task's family is not installed."""
    driver, python = driver_of(task), families.python_of(task.family) if task.family else None
    return HostSpec(
        driver.target,
        (driver.target, *driver.imports),
        python=python,
        log=log,
        name=f"host of {task.name} agents",
        pass_env=tuple(task.pass_env),
        limits=limits,
    )


class AgentPool:
    """Implements `core.protocols.AgentPool`. At most `processes` episodes of a task at the same time, split over hosts,
    one for each of the `requests`. The time of an episode is its caller's to limit. What agents print goes to `log`."""

    def __init__(
        self,
        tasks: Sequence[TaskConfig],
        gateway: Gateway,
        launcher: Launcher,
        *,
        processes: int,
        limits: ProcessLimitsConfig = _LIMITS,
        requests: Sequence[ResourceRequest] = (),
        log: Path | None = None,
        on_host_change: HostCallback | None = None,
    ) -> None:
        self._gateway, self._processes = gateway, processes
        self._tasks = {task.name: task for task in tasks}
        locations = [
            HostLocation(launcher, replace(request, count=request.count / len(tasks)))
            for request in requests or [ResourceRequest()]
        ]
        self._pools = {
            task.name: ProcessPool(
                host_spec(task, limits, log), processes, locations=locations, on_host_change=on_host_change
            )
            for task in tasks
        }

    def sample(self) -> GatewaySample:
        return self._gateway.sample()

    @property
    def in_use(self) -> int:
        return sum(pool.in_use for pool in self._pools.values())

    @property
    def capacity(self) -> int:
        return self._processes * len(self._pools)

    async def start(self) -> None:
        """Raises ServiceError, for example for a module that cannot be imported."""
        results = await asyncio.gather(*(pool.start() for pool in self._pools.values()), return_exceptions=True)
        for task, result in zip(self._pools, results, strict=True):
            if isinstance(result, ServiceError):
                raise ServiceError(f"the agent of task {task!r} cannot start: {result}") from result
            if result is not None:
                raise result

    async def watch(self) -> NoReturn:
        """Wait until some task has no host left. Raises ServiceError."""
        async with asyncio.TaskGroup() as group:
            for pool in self._pools.values():
                group.create_task(pool.watch())
        raise AssertionError("unreachable")

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    @asynccontextmanager
    async def claim(self, task: str) -> AsyncIterator["AgentClaim"]:
        """Raises EnvironmentFailed when there is no host any more."""
        try:
            async with self._pools[task].claim() as claim:
                claim.reusable = False
                await claim.acquire()
                yield AgentClaim(self._tasks[task], self._gateway, claim)
        except (ProcessLost, ServiceError) as error:
            raise EnvironmentFailed(f"task {task!r} has no process for its agent: {error}") from error


class AgentClaim:
    """A process in which one episode will be played."""

    def __init__(self, task: TaskConfig, gateway: Gateway, claim: ProcessClaim) -> None:
        assert task.agent is not None
        self._task, self._gateway, self._claim = task, gateway, claim

    async def play(
        self, id: str, seed: int, held_out: bool, generate: Generate, captured: Callable[[CapturedEpisode], None]
    ) -> Step:
        """The whole episode. Raises EnvironmentFailed, EngineFailed or RewardFailed."""
        failures: list[EngineFailed] = []  # the program may fail because of them

        async def observed(request: GenerationRequest, stream: TokenStream | None = None, /) -> Completion:
            try:
                return await generate(request, stream)
            except EngineFailed as error:
                failures.append(error)
                raise

        episode = AgentEpisode(id, self._task.name, seed, held_out, self._task.args)
        opened, raised = None, None
        verdict = Verdict()
        try:
            async with self._gateway.episode(self._limits(id, seed), observed) as opened:
                endpoint = asdict(opened.endpoint)
                args = {"agent": driver_of(self._task).agent, "endpoint": endpoint, "episode": asdict(episode)}
                try:
                    verdict = await self._run(args, failures)
                except _Raised as error:
                    raised = error  # it may be due to a limit, which is known when the episode is captured
        finally:
            if opened is not None and opened.captured is not None:
                captured(opened.captured)
        if raised is not None and not (opened.captured is not None and opened.captured.limited):
            raise raised
        return self._step(verdict, opened.captured, raised)

    def _limits(self, id: str, seed: int) -> EpisodeLimits:
        agent, config = self._task.agent, self._task.sampling
        assert agent is not None
        return EpisodeLimits(
            id,
            self._task.name,
            seed,
            Sampling(config.temperature, config.top_p, config.top_k, config.max_tokens),
            self._task.max_context,
            max_calls=agent.max_calls,
            max_parallel=agent.max_parallel,
        )

    async def _run(self, args: dict[str, Any], failures: list[EngineFailed]) -> Verdict:
        try:
            result = await self._claim.call("run", args, MAX_EPISODE_S)
        except (ProcessLost, CallRaised) as error:
            reason = str(error).replace(args["endpoint"]["key"], "(its key)")  # it may be part of a URL
            failed = f"the agent of task {self._task.name!r} failed: {reason}"
            if failures:
                raise EngineFailed(f"{failures[-1]}, then {failed}") from error
            raise (_Raised if isinstance(error, CallRaised) else EnvironmentFailed)(failed) from error
        try:
            return parse_verdict(result)
        except InvalidValue as error:
            raise EnvironmentFailed(f"the agent of task {self._task.name!r} returned no verdict: {error}") from error

    def _step(self, verdict: Verdict, captured: CapturedEpisode | None, raised: "_Raised | None") -> Step:
        name, reward = self._task.name, verdict.reward
        if captured is None:
            raise EnvironmentFailed(f"the gateway was lost when the agent of task {name!r} had ended")
        if not captured.turns:
            raise EnvironmentFailed(f"the agent of task {name!r} ended without a single response of the policy")
        if reward is None and self._task.reward.function == RewardConfig().function:
            cause = f"{raised}, after it had reached a limit; so " if raised is not None else ""
            raise RewardFailed(
                f"{cause}the agent of task {name!r} returned no reward, and the task names no reward function"
            )
        info = verdict.info if verdict.success is None else {**verdict.info, "success": verdict.success}
        return Step((), reward, done=True, truncated=captured.truncated or raised is not None, info=info)


class _Raised(EnvironmentFailed):
    """The program itself raised, or ended with an error."""
