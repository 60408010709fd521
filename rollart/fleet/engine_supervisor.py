"""The engines of a run: started where placement says, watched, restarted on another node when they are lost.

Invariants: an engine serves only once it has the registry's target version; one that ends, or that the registry gave
up, is restarted with backoff, and one that keeps ending soon after its start is removed for good; the run ends only
when no engine is left. Engines that someone else runs are connected to, and reconnected: a link that fails again and
again, or a node, is not the engine's fault, and only slows its restarts down.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rollart.config import RunFile
from rollart.core.errors import EngineFailed, EngineLost, ServiceError
from rollart.core.events import EngineSample, EventSink, ServiceEnded, Warned
from rollart.core.types import EngineStatus, Publication
from rollart.engines.backends import backend_of
from rollart.engines.client import EngineClient, StatusPush
from rollart.hardware.devices import DeviceClass
from rollart.hardware.roofline import ModelShape, Roofline
from rollart.launch import rpc
from rollart.launch.launcher import (
    Command,
    Launcher,
    ResourceRequest,
    ServiceHandle,
    relaunch,
    service_command,
    service_started,
)
from rollart.models.folder import read_seconds
from rollart.placement.bindings import Binding
from rollart.placement.plan import acts_as
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.engine_state import EnginePool

SAMPLE_S, SAMPLES_PER_S, SILENT_S = 1.0, 100.0, 30.0
SETTLED_S = 60.0  # an engine that lived this long can start
MAX_SHORT_LIVES = 3
MAX_RESTARTS = 30  # attempts to bring one engine back
BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
_FRONT = ResourceRequest(count=0.1)  # for a service in front of a server that someone else runs


class StatusSource(Protocol):
    async def push_status(self, push: StatusPush, on_status: Callable[[EngineStatus], None]) -> None: ...


@dataclass(slots=True)
class _Engine:
    binding: Binding
    pool: EnginePool
    device: DeviceClass
    slowdown: float
    started: ServiceHandle
    client: EngineClient
    since: float
    short_lives: int = 0
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)


class EngineSampler:
    """Lets engines report their status, each every `SAMPLE_S` seconds, but all together at most `SAMPLES_PER_S`: of
    thousands, each reports less often, so that the controller is not busy with that alone. They take turns."""

    def __init__(self, registry: EngineRegistry, sink: EventSink) -> None:
        self._registry, self._sink = registry, sink
        self._turns = 0

    async def sample(self, name: str, client: StatusSource) -> None:
        """Returns when the engine is lost, which the registry then knows. One that is silent for too long is asked
        again: its connection may live, and the call may not."""
        every = max(SAMPLE_S, self._registry.size / SAMPLES_PER_S)
        push = StatusPush(self._turns / SAMPLES_PER_S % every, every)
        self._turns += 1
        while True:
            try:
                await self._follow(name, client, push)
            except TimeoutError:
                self._sink.emit(Warned(message=f"{name} has not reported its status for {every + SILENT_S:.0f} s"))
            except EngineLost:
                self._registry.mark_lost(name, "its connection was lost")
                return
            except EngineFailed as error:
                self._sink.emit(Warned(message=f"{name} did not report its status: {error}"))
                await asyncio.sleep(every)

    async def _follow(self, name: str, client: StatusSource, push: StatusPush) -> None:
        """Never returns; raises EngineFailed, and TimeoutError when no status came for too long."""
        clock, silent_s = asyncio.get_running_loop().time, push.every + SILENT_S

        def on_status(status: EngineStatus) -> None:
            if not deadline.expired():
                deadline.reschedule(clock() + silent_s)
            self._registry.update_status(name, status)
            with suppress(OSError):  # a log that cannot be written: the next event of the run raises it again
                self._sink.emit(EngineSample.of(name, status))

        async with asyncio.timeout(push.first + silent_s) as deadline:
            await client.push_status(push, on_status)


class EngineSupervisor:
    """`version` is what engines must have to serve; `spec` is what all of them need: model, weights, seed, version.
    `registry` has the engines that may serve."""

    def __init__(
        self,
        run: RunFile,
        bindings: Sequence[Binding],
        *,
        version: int,
        launcher: Launcher,
        devices: Mapping[str, DeviceClass],
        shape: ModelShape,
        spec: Callable[[], dict[str, Any]],
        sink: EventSink,
        logs: Path,
        registry: Callable[..., EngineRegistry] = EngineRegistry,
    ) -> None:
        self._run, self._bindings, self._launcher, self._sink = run, bindings, launcher, sink
        self._devices, self._shape, self._spec, self._logs = devices, shape, spec, logs
        self._engines: dict[str, _Engine] = {}
        self._pools: dict[str, EnginePool] = {}
        self.registry = registry(version=version, sink=sink, on_lost=self._kill)
        self._sampler = EngineSampler(self.registry, sink)

    @property
    def clients(self) -> dict[str, EngineClient]:
        return {name: engine.client for name, engine in self._engines.items()}

    def pool_of(self, name: str) -> EnginePool:
        return self._engines[name].pool

    def _kill(self, name: str) -> None:
        self._engines[name].started.kill()

    async def start(self) -> None:
        async with asyncio.TaskGroup() as group:
            for binding in self._bindings:
                group.create_task(self._start(binding, None))

    async def stop(self) -> None:
        await asyncio.gather(*(self._stop(engine) for engine in self._engines.values()))

    async def _stop(self, engine: _Engine) -> None:
        await engine.stack.aclose()
        await engine.started.stop()

    async def register(self, publish: Callable[[], Awaitable[Publication]] | None) -> None:
        """Let the started engines serve, once all have the registry's version: engines that someone else runs may still
        have that of an earlier run, and can be updated only with `publish`. One whose connection is lost meanwhile is
        registered as lost: supervision brings it back. Raises ServiceError."""
        version = self.registry.target
        lost: dict[str, str] = {}
        versions = await asyncio.gather(*(self._version(name, lost) for name in self._engines))
        others = [name for name, served in zip(self._engines, versions, strict=True) if served != version]
        if others and publish is None and not lost:
            names = " and ".join(others)
            raise ServiceError(f"{names} serve another version than the model's; restart them from that model")
        if others and publish is not None:
            self.registry.aim_at(await publish())
            await asyncio.gather(*(self._catch_up(name, lost) for name in others if name not in lost))
        for name, engine in self._engines.items():
            self.registry.add(name, engine.client, version, engine.pool)
        for name, reason in lost.items():
            self.registry.mark_lost(name, reason)

    async def _version(self, name: str, lost: dict[str, str]) -> int | None:
        try:
            return (await self._engines[name].client.status()).version
        except EngineLost as error:
            lost[name] = str(error)
            return None

    async def _catch_up(self, name: str, lost: dict[str, str]) -> None:
        try:
            await self.registry.catch_up(self._engines[name].client)
        except EngineLost as error:
            lost[name] = str(error)
        except EngineFailed as error:
            version = self.registry.target
            raise ServiceError(f"{name} serves another version than {version} and cannot load it: {error}") from error

    async def _start(self, binding: Binding, ended: ServiceHandle | None) -> _Engine:
        """Start or connect, and report where it is."""
        clock = asyncio.get_running_loop().time
        began = clock()
        device_name, slowdown = acts_as(self._run, binding)
        pool = self._run.all_pools()[binding.pool]
        stack = AsyncExitStack()
        started: ServiceHandle
        if binding.url and backend_of(pool).connects:
            external = rpc.ExternalService(binding.worker, binding.url, device_name)
            client = await external.connect(stack)
            started = external
        else:
            started = await self._launch(binding, ended)
            if binding.url:
                started.device = device_name  # that of its server, wherever the service in front of it is
            try:
                url = str(started.answer["url"])
                client = await stack.enter_async_context(rpc.connected(url, key=self._launcher.key))
            except BaseException:
                await started.stop()
                raise
        if slowdown == 1.0:
            device_name = started.device
        device = self._devices[device_name]
        old = self._engines.get(binding.worker)
        engine = _Engine(
            binding=binding,
            pool=self._pool(binding, device, slowdown),
            device=device,
            slowdown=slowdown,
            started=started,
            client=EngineClient(client, deadline=self._run.engine.deadline),
            since=clock(),
            short_lives=old.short_lives if old is not None else 0,
            stack=stack,
        )
        self._engines[binding.worker] = engine
        self._report_started(engine, clock() - began)
        return engine

    async def _launch(self, binding: Binding, ended: ServiceHandle | None) -> ServiceHandle:
        command = engine_command(self._run, binding, self._spec(), self._devices, self._logs)
        request = request_of(binding)
        if ended is None:
            return await self._launcher.launch(command, request)
        return await relaunch(self._launcher, command, request, ended)

    def _pool(self, binding: Binding, device: DeviceClass, slowdown: float) -> EnginePool:
        """The router's pool: engines of one user pool that got different classes are in different ones."""
        config = self._run.engine
        label = binding.pool
        if slowdown != 1.0:
            label += f": emulated {device.name} (1/{slowdown:g})"
        elif device.name != binding.wanted:
            label += f": {device.name}"
        if label not in self._pools:
            here = replace(self._shape, number_bytes=4 if config.dtype == "float32" else 2)
            kv_tokens = (config.kv_megabytes << 20) // here.kv_bytes
            roofline = Roofline(device, self._shape, slowdown, binding.devices)
            self._pools[label] = EnginePool(label, roofline, config.max_batch, kv_tokens, of=binding.pool)
        return self._pools[label]

    def _report_started(self, engine: _Engine, seconds: float) -> None:
        started, binding = engine.started, engine.binding
        self._sink.emit(service_started("generate", binding.worker, started, seconds))
        self._sink.emit(binding.placed(started, engine.pool.name))

    # While the run goes on

    async def supervise(self) -> None:
        """Never returns; raises ServiceError when no engine is left."""
        async with asyncio.TaskGroup() as group:
            for name in list(self._engines):
                group.create_task(self._watch(name))

    async def _watch(self, name: str) -> None:
        while True:
            engine = self._engines[name]
            if not self.registry.has(name, engine.client):  # supervision ended while it was being restarted
                engine.started.kill()
            sampling = asyncio.create_task(self._sampler.sample(name, engine.client))
            try:
                reason = await engine.started.wait()
            finally:
                sampling.cancel()
                await asyncio.wait([sampling])
            self._sink.emit(ServiceEnded(role="generate", name=name, reason=reason))
            self.registry.mark_lost(name, reason)
            await engine.stack.aclose()
            lived = asyncio.get_running_loop().time() - engine.since
            engine.short_lives = 0 if lived > SETTLED_S else engine.short_lives + 1
            outside = bool(engine.binding.url) or engine.started.node_lost
            if engine.short_lives > (MAX_RESTARTS if outside else MAX_SHORT_LIVES):
                self._remove(name, f"it ended {engine.short_lives} times soon after its start, the last: {reason}")
                return
            if (extra := engine.short_lives - MAX_SHORT_LIVES) > 0:
                await asyncio.sleep(min(MAX_BACKOFF_S, BACKOFF_S * 2 ** (extra - 1)))
            if not await self._restart(engine):
                return

    async def _restart(self, ended: _Engine) -> bool:
        name, backoff = ended.binding.worker, BACKOFF_S
        for _ in range(MAX_RESTARTS):
            try:
                engine = await self._start(ended.binding, ended.started)
                version = await self.registry.catch_up(engine.client)
            except (ServiceError, EngineFailed) as error:
                self._sink.emit(Warned(message=f"{name} is not back yet: {error}"))
                last = str(error)
            else:
                self.registry.add(name, engine.client, version, engine.pool)
                return True
            if (broken := self._engines[name]) is not ended and broken.started is not ended.started:
                await self._stop(broken)
            await asyncio.sleep(backoff)
            backoff = min(MAX_BACKOFF_S, backoff * 2)
        self._remove(name, f"it could not be restarted in {MAX_RESTARTS} attempts, the last: {last}")
        return False

    def _remove(self, name: str, reason: str) -> None:
        del self._engines[name]
        self.registry.remove(name)
        if not self._engines:
            raise ServiceError(f"no engine is left; {name}: {reason}")
        self._sink.emit(Warned(message=f"the run goes on without engine {name}: {reason}"))


def engine_command(
    run: RunFile, binding: Binding, spec: Mapping[str, Any], devices: Mapping[str, DeviceClass], logs: Path
) -> Command:
    """`spec` is what all engines of the run have in common."""
    pool = run.all_pools()[binding.pool]
    backend, (device, slowdown) = backend_of(pool), acts_as(run, binding)
    full = {**spec, "config": run.engine.model_dump(mode="json"), "classes": binding.choices, **backend.spec(run, pool)}
    if run.training.replay_experts and pool.role == "generate":
        full["record_experts"] = True
    if slowdown != 1.0:
        full["emulate"] = {"device": asdict(devices[device]), "slowdown": slowdown}
    if binding.url:
        full["url"] = binding.url
    command = replace(engine_process(run, binding, logs), spec=full)
    seconds = backend.start_deadline(run) + read_seconds(Path(spec["model"]))
    return replace(command, start_deadline=seconds, start_key="engine.start_deadline")


def engine_process(run: RunFile, binding: Binding, logs: Path) -> Command:
    """The command of an engine, without its spec."""
    module = backend_of(run.all_pools()[binding.pool]).module
    return service_command(module, {}, name=binding.worker, logs=logs, threads=run.engine.thread_count)


def request_of(binding: Binding) -> ResourceRequest:
    return _FRONT if binding.url else binding.request()
