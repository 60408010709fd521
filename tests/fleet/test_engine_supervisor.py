import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

import pytest
import uvicorn
from world import Recorder

from benchmarks.modelled import ModelledEngine
from rollart.app import preflight
from rollart.config import RunFile
from rollart.core.events import ServiceEnded, Warned
from rollart.core.types import EngineStatus, LoadResult, Publication
from rollart.engines.client import StatusPush, push_handler
from rollart.fleet import engine_supervisor
from rollart.fleet.engine_supervisor import SAMPLES_PER_S, EngineSampler, EngineSupervisor, engine_command, request_of
from rollart.hardware.roofline import ModelShape
from rollart.launch import rpc
from rollart.launch.launcher import WITH_PARENT, Command, Node, ResourceRequest
from rollart.launch.local import LocalLauncher
from rollart.placement.inventory import Inventory
from rollart.placement.plan import plan
from rollart.rollout.engine_registry import EngineRegistry
from rollart.simulator import clock

RUN = """
model: {tiny: {hidden: 64, layers: 2, heads: 2, kv_heads: 1, context: 256}}
tasks: [{name: t, env: "benchmarks.paced:Shaped", max_context: 200}]
"""
SPEC = {"model": "m", "weights": "w", "seed": 0, "version": 0}


def commands(run: RunFile, logs: Path) -> list[tuple[Command, ResourceRequest]]:
    node = Node("here", "", {"cpu": 8.0, "H20": 4.0}, {"cpu": 8.0, "H20": 4.0})
    bindings = plan(run, Inventory((node,), "this machine", overcommit=True)).of("policy")
    return [(engine_command(run, one, SPEC, run.device_classes(), logs), request_of(one)) for one in bindings]


def loaded(folder: Path, pool: str, more: str = "") -> RunFile:
    path = folder / "run.yaml"
    path.write_text(f"{RUN}pools: {{policy: {pool}}}\n{more}")
    return preflight.load_run(path)


def test_the_spec_of_an_embedded_engine_says_what_it_emulates(tmp_path: Path) -> None:
    run = loaded(tmp_path, "{role: generate, device: H20, emulate: 100}")
    [(command, request)] = commands(run, tmp_path)
    assert command.argv == (*WITH_PARENT, "rollart.engines.torch.service")
    assert command.spec["emulate"]["device"]["name"] == "H20" and command.spec["emulate"]["slowdown"] == 100
    assert request.devices == ("cpu",)


def test_the_spec_of_a_vllm_engine_has_its_python_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.touch(mode=0o700)
    monkeypatch.setenv("ROLLART_VLLM_PYTHON", str(python))
    more = "vllm: {start_deadline: 1000}\nrouting: {disaggregate: auto}\n"
    run = loaded(tmp_path, "{role: generate, device: H20, count: 2, engine: vllm, tensor_parallel: 2}", more)
    for command, request in commands(run, tmp_path):
        assert command.argv == (*WITH_PARENT, "rollart.engines.vllm.service")
        assert command.spec["vllm"]["python"] == str(python)
        assert command.spec["tensor_parallel"] == 2 and command.spec["kv_transfer"] is True
        assert "url" not in command.spec and command.start_deadline > 1000
        assert (request.devices, request.count) == (("H20",), 2)


def test_each_server_that_someone_else_runs_gets_a_service_that_takes_no_device(tmp_path: Path) -> None:
    urls = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    run = loaded(tmp_path, f"{{role: generate, device: H20, engine: vllm, urls: {urls}}}")
    made = commands(run, tmp_path)
    assert [command.spec["url"] for command, _ in made] == urls
    assert all(request.devices == ("cpu",) and request.count < 1 for _, request in made)


@contextlib.asynccontextmanager
async def served_engine() -> AsyncIterator[tuple[str, list[str]]]:
    """An engine of our own that someone else runs: its URL, and what was asked of it."""
    asked: list[str] = []
    version = 0

    async def status(_: object) -> EngineStatus:
        asked.append("status")
        return EngineStatus(version, *([0] * 7), busy_s=0.0)

    async def load(publication: Publication) -> LoadResult:
        nonlocal version
        asked.append("load")
        version = publication.version
        return LoadResult(version)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        app = rpc.application({"status": status, "statuses": push_handler(status), "load": load})
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
        finally:
            server.should_exit = True
            await serving


def supervisor_of(url: str, folder: Path, sink: Recorder, version: int) -> EngineSupervisor:
    run = loaded(folder, f"{{role: generate, device: cpu, urls: ['{url}']}}")
    node = Node("here", "", {"cpu": 8.0}, {"cpu": 8.0})
    return EngineSupervisor(
        run,
        plan(run, Inventory((node,), "this machine", overcommit=True)).of("policy"),
        version=version,
        launcher=LocalLauncher(),
        devices=run.device_classes(),
        shape=ModelShape(dense=1000, layers=1, heads=1, kv_heads=1, head_dim=8),
        spec=dict,
        sink=sink,
        logs=folder,
    )


@pytest.mark.parametrize("publishes", [True, False])
def test_an_engine_whose_connection_is_reset_before_it_serves_is_brought_back(tmp_path: Path, publishes: bool) -> None:
    sink, version = Recorder(), 3 if publishes else 0

    async def publish() -> Publication:
        return Publication(version)

    async def main() -> None:
        async with asyncio.timeout(30), served_engine() as (url, asked):
            supervisor = supervisor_of(url, tmp_path, sink, version)
            await supervisor.start()
            [(name, client)] = supervisor.clients.items()
            client._client.fail("the connection was reset")
            await supervisor.register(publish if publishes else None)
            assert not supervisor.registry.has(name, client) and not supervisor.registry.empty
            revived = supervisor.registry.revived
            revived.clear()
            supervising = asyncio.create_task(supervisor.supervise())
            await revived.wait()
            assert supervisor.registry.has(name, supervisor.clients[name])
            assert ("load" in asked) == publishes and supervisor.registry.serving == version
            supervising.cancel()
            await asyncio.wait([supervising])
            await supervisor.stop()

    asyncio.run(main())
    assert [event.reason for event in sink.of(ServiceEnded)] == ["the connection was reset"]


def test_a_link_that_fails_again_and_again_takes_no_engine_of_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_supervisor, "BACKOFF_S", 0.0)
    resets, sink = 2 * engine_supervisor.MAX_SHORT_LIVES, Recorder()

    async def main() -> None:
        async with asyncio.timeout(30), served_engine() as (url, _):
            supervisor = supervisor_of(url, tmp_path, sink, version=0)
            await supervisor.start()
            await supervisor.register(None)
            revived = supervisor.registry.revived
            supervising = asyncio.create_task(supervisor.supervise())
            for _ in range(resets):
                [(name, client)] = supervisor.clients.items()
                revived.clear()
                client._client.fail("the connection was reset")
                await asyncio.wait(
                    [supervising, returned := asyncio.create_task(revived.wait())], return_when=asyncio.FIRST_COMPLETED
                )
                assert returned.done() and supervisor.registry.has(name, supervisor.clients[name])
            supervising.cancel()
            await asyncio.wait([supervising])
            await supervisor.stop()

    asyncio.run(main())
    assert len(sink.of(ServiceEnded)) == resets


class CountedEngine(ModelledEngine):
    def __init__(self, name: str, asked: Counter[str]) -> None:
        super().__init__(Random(0))
        self._name, self._asked = name, asked

    async def status(self) -> EngineStatus:
        self._asked[self._name] += 1
        return await super().status()

    async def push_status(self, push: StatusPush, on_status: Callable[[EngineStatus], None]) -> None:
        await push_handler(self.status)(push, on_status)


@pytest.mark.parametrize(("engines", "seconds", "fewest", "most"), [(2, 10, 9, 11), (1500, 32, 2, 3)])
def test_thousands_of_engines_are_sampled_less_often_but_all_of_them(
    engines: int, seconds: int, fewest: int, most: int
) -> None:
    asked: Counter[str] = Counter()

    async def sampled() -> None:
        clients = {name: CountedEngine(name, asked) for name in map(str, range(engines))}
        sampler = EngineSampler(EngineRegistry(clients), Recorder())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for name, client in clients.items():
                    group.create_task(sampler.sample(name, client))

    clock.run(sampled())
    assert len(asked) == engines
    assert fewest <= min(asked.values()) and max(asked.values()) <= most
    assert asked.total() <= seconds * SAMPLES_PER_S + 1


def test_an_engine_that_does_not_report_any_more_is_asked_again() -> None:
    sink, reported = Recorder(), 0

    class Forgetful(ModelledEngine):
        asked = 0

        async def push_status(self, push: StatusPush, on_status: Callable[[EngineStatus], None]) -> None:
            nonlocal reported
            self.asked += 1
            for _ in range(3):
                await asyncio.sleep(push.every)
                on_status(await self.status())
                reported += 1
            await asyncio.Event().wait()

    async def sampled() -> None:
        engine = Forgetful(Random(0))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                await EngineSampler(EngineRegistry({"engine": engine}), sink).sample("engine", engine)
        assert engine.asked == 2

    clock.run(sampled())
    assert reported == 6
    assert [event.message for event in sink.of(Warned)] == ["engine has not reported its status for 31 s"]
