"""Judges and opponents of a run: models of pools of role judge, behind an OpenAI-compatible API of the controller.

The API is there from the start, so that reward functions and environments have a URL that stays; what runs on the nodes
of a cluster gets one that they reach. The engines behind it are those of any pool; they are started by the first
request, and end when there was none for `idle` seconds. Invariants: an engine ends only when it has no request;
requests wait while one starts, and fail together if it cannot; a lost engine is started again by the next request. What
fails is a failed reward or environment of those that asked, never an end of the run.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from rollart.config import INVOKERS, RunFile, TaskConfig
from rollart.core.errors import ConfigError, EngineFailed, ServiceError
from rollart.core.events import EventSink, ServiceEnded
from rollart.core.protocols import TokenStream
from rollart.core.types import Completion, GenerationRequest
from rollart.engines.client import EngineClient
from rollart.fleet.engine_supervisor import engine_command
from rollart.gateway.limits import GatewayLimits
from rollart.gateway.model_server import model_front
from rollart.launch import rpc
from rollart.launch.launcher import Launcher, ServiceHandle, service_started
from rollart.launch.service import LOOPBACK
from rollart.models.folder import is_reward_model, model_problem
from rollart.placement.bindings import Binding

OPPONENT = "rollart.envs.adapters.opponents:Served"


class _JudgeEngine:
    """One engine, started when it is needed."""

    def __init__(self, run: RunFile, binding: Binding, *, launcher: Launcher, logs: Path, sink: EventSink) -> None:
        self._run, self._binding, self._launcher, self._sink = run, binding, launcher, sink
        self._folder, self._logs = Path(str(run.pools[binding.pool].model)), logs
        self._start = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._handle: ServiceHandle | None = None
        self._client: EngineClient | None = None
        self._watch: asyncio.Task[None] | None = None
        self.requests = 0

    @asynccontextmanager
    async def client(self) -> AsyncIterator[EngineClient]:
        """Raises EngineFailed if it cannot start."""
        self.requests += 1
        try:
            async with self._start:
                if self._client is None:
                    await self._launch()
            assert self._client is not None
            yield self._client
        finally:
            self.requests -= 1

    async def _launch(self) -> None:
        clock = asyncio.get_running_loop().time
        began, name = clock(), self._binding.worker
        spec: dict[str, Any] = {"model": str(self._folder.absolute()), "weights": str(self._logs / f".{name}-weights")}
        spec |= {"seed": self._run.seed, "version": 0}
        command = engine_command(self._run, self._binding, spec, self._run.device_classes(), self._logs)
        try:
            self._handle = await self._launcher.launch(command, self._binding.request())
            connection = rpc.connected(str(self._handle.answer["url"]), key=self._launcher.key)
            own = await self._stack.enter_async_context(connection)
        except ServiceError as error:
            await self.stop("it did not start")
            raise EngineFailed(f"the judge {name} cannot be started: {error}") from error
        self._client = EngineClient(own, deadline=self._run.engine.deadline)
        self._watch = asyncio.create_task(self._watched(self._handle))
        self._sink.emit(service_started("judge", name, self._handle, clock() - began))
        self._sink.emit(self._binding.placed(self._handle))

    async def _watched(self, handle: ServiceHandle) -> None:
        reason = await handle.wait()
        if handle is self._handle:
            self._watch = None  # not to be cancelled from within
            await self.stop(reason)

    async def end_if_idle(self, reason: str) -> None:
        """A request that comes meanwhile waits, and starts it again."""
        async with self._start:
            if self.running and not self.requests:
                await self.stop(reason)

    async def stop(self, reason: str) -> None:
        """It can be started again."""
        handle, watch, stack = self._handle, self._watch, self._stack
        self._handle = self._client = self._watch = None
        self._stack = AsyncExitStack()
        if watch is not None:
            watch.cancel()
        await stack.aclose()
        if handle is not None:
            await handle.stop()
            self._sink.emit(ServiceEnded(role="judge", name=self._binding.worker, reason=reason))

    @property
    def running(self) -> bool:
        return self._handle is not None


class _JudgePool:
    """The engines of one pool. Not `idle`: they are started at once, and stay."""

    def __init__(self, engines: Sequence[_JudgeEngine], idle: float | None) -> None:
        self._engines, self._idle = engines, idle
        self._timer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises EngineFailed."""
        if self._idle is None:
            await asyncio.gather(*map(_started, self._engines))

    async def generate(self, request: GenerationRequest, stream: TokenStream | None = None, /) -> Completion:
        engine = min(self._engines, key=lambda each: (each.requests, not each.running))
        if self._timer is not None:
            self._timer.cancel()
        try:
            async with engine.client() as client:
                if stream is None:
                    return await client.generate(request)
                on_tokens = stream.on_tokens
                return await client.generate_in_parts(request, stream.every, lambda part: on_tokens(part.tokens))
        finally:
            if self._idle is not None and not any(each.requests for each in self._engines):
                self._timer = asyncio.create_task(self._end_when_idle(self._idle))

    async def _end_when_idle(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._timer = None  # from here on it is not cancelled
        await asyncio.gather(*(each.end_if_idle(f"idle for {seconds:g} s") for each in self._engines))

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(each.stop("the run ended") for each in self._engines))


async def _started(engine: _JudgeEngine) -> None:
    async with engine.client():
        pass


class Judges:
    """`addresses` has the URL and the model of each pool, once they are started."""

    def __init__(
        self, run: RunFile, bindings: Sequence[Binding], *, launcher: Launcher, logs: Path, sink: EventSink
    ) -> None:
        self._run, self._stack = run, AsyncExitStack()
        self._launcher = launcher
        self._opponents = {task.opponent for task in run.tasks}
        remote = {task.reward.pool for task in run.tasks if INVOKERS[task.reward.invoker].cluster}
        self._away = self._opponents | remote  # who asks these may be on other nodes
        self.addresses: dict[str, tuple[str, str]] = {}
        self._engines: dict[str, list[_JudgeEngine]] = {}
        for binding in bindings:
            pool = run.pools[binding.pool]
            if binding.url:
                self.addresses[binding.pool] = (binding.url, str(pool.model))
                continue
            _check_folder(Path(str(pool.model)), binding.pool)
            engine = _JudgeEngine(run, binding, launcher=launcher, logs=logs, sink=sink)
            self._engines.setdefault(binding.pool, []).append(engine)

    async def start(self) -> None:
        """Raises ServiceError or EngineFailed."""
        for name, engines in self._engines.items():
            config = self._run.pools[name]
            pool = _JudgePool(engines, None if name in self._opponents else config.idle)
            self._stack.push_async_callback(pool.close)
            front = model_front(
                Path(str(config.model)),
                pool.generate,
                name=name,
                key=secrets.token_urlsafe(24),
                host=await self._launcher.own_address() if name in self._away else LOOPBACK,
                port=0,
                limits=GatewayLimits(),
            )
            endpoint = await self._stack.enter_async_context(front)
            self.addresses[name] = (f"{endpoint.keyed_url}/v1", name)
            await pool.start()

    async def close(self) -> None:
        await self._stack.aclose()


def with_judges(task: TaskConfig, addresses: Mapping[str, tuple[str, str]]) -> TaskConfig:
    """The task with the addresses of its judge and its opponent in the arguments of reward and environment."""
    if task.reward.pool is not None:
        url, model = addresses[task.reward.pool]
        reward = task.reward.model_copy(update={"args": {**task.reward.args, "url": url, "model": model}})
        task = task.model_copy(update={"reward": reward})
    if task.opponent is not None:
        url, model = addresses[task.opponent]
        args = {"opponent": OPPONENT, **task.args}
        args["opponent_args"] = {**args.get("opponent_args", {}), "url": url, "model": model}
        task = task.model_copy(update={"args": args})
    return task


def _check_folder(folder: Path, pool: str) -> None:
    if problem := model_problem(folder):
        raise ConfigError(f"pools.{pool}.model: {folder} {problem}")
    if is_reward_model(folder):
        use = f"reward: {{function: reward_model, args: {{model: {folder}}}}}"
        raise ConfigError(f"pools.{pool}.model: {folder} is a reward model, which writes nothing; use {use}")
