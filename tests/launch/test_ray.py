"""A real Ray cluster of several nodes, all on this machine."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from rollart.config import EnvironmentsConfig, TaskConfig  # noqa: E402
from rollart.core.errors import EnvironmentFailed, ServiceError  # noqa: E402
from rollart.envs.pool import EnvironmentPool  # noqa: E402
from rollart.launch import rpc  # noqa: E402
from rollart.launch.launcher import Command, ResourceRequest, Unsatisfiable, relaunch, service_command  # noqa: E402
from rollart.launch.local import free_port  # noqa: E402
from rollart.launch.ray import RayLauncher  # noqa: E402
from rollart.launch.ray_nodes import RayNode  # noqa: E402

pytestmark = pytest.mark.slow

SERVICES = str(Path(__file__).parent)
SMALL = {"object_store_memory": 80_000_000, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    head = {"num_cpus": 2, "labels": {"rollart.io/device": "cpu"}, **SMALL}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=2, labels={"rollart.io/device": "H800"}, **SMALL)
        yield cluster
    finally:
        cluster.shutdown()


@contextlib.asynccontextmanager
async def joined(cluster: Cluster, **options: Any) -> AsyncIterator[RayLauncher]:
    launcher = RayLauncher(cluster.address, **options)
    try:
        async with asyncio.timeout(120):
            yield launcher
    finally:
        await launcher.close()


def echo(name: str = "echo") -> Command:
    return Command(name, ("-m", "echo_service"), {"word": "hello"}, environment={"PYTHONPATH": SERVICES})


@contextlib.contextmanager
def extra_node(cluster: Cluster, device: str, cpus: int = 2) -> Iterator[Any]:
    node = cluster.add_node(num_cpus=cpus, labels={"rollart.io/device": device}, **SMALL)
    try:
        yield node
    finally:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node, allow_graceful=False)


def test_a_service_runs_on_a_node_of_its_class_and_asks_for_the_key(cluster: Cluster) -> None:
    async def main() -> None:
        async with joined(cluster) as launcher:
            started = await launcher.launch(echo(), ResourceRequest(("H800",)))
            nodes = {node.name: node for node in await launcher.nodes()}
            assert started.device == "H800"
            assert nodes[started.node].total == {"H800": 2}
            assert nodes[started.node].free == {"H800": 1}
            url = started.answer["url"]
            assert started.address in url
            with pytest.raises(ServiceError, match="needs the key"):
                await rpc.connect(url)
            async with rpc.connected(url, key=launcher.key) as client:
                assert await client.call("word", returns=str, deadline=10) == "hello"
            await started.stop()
            assert "exit code 0" in await started.wait()
            assert not psutil.pid_exists(started.pid)

    asyncio.run(main())


def test_the_next_class_is_taken_when_the_first_is_absent_or_full(cluster: Cluster) -> None:
    async def main() -> None:
        async with joined(cluster) as launcher:
            # What an ended service had is free when the cluster has noticed.
            while not any(node.free == {"H800": 2} for node in await launcher.nodes()):
                pass
            request = ResourceRequest(("H20", "H800", "cpu"), count=2)
            first = await launcher.launch(echo("first"), request)
            second = await launcher.launch(echo("second"), request)
            assert [first.device, second.device] == ["H800", "cpu"]

    asyncio.run(main())


def test_what_no_node_has_is_refused_with_what_there_is(cluster: Cluster) -> None:
    async def main() -> None:
        async with joined(cluster) as launcher:
            with pytest.raises(Unsatisfiable, match=r"echo needs 1 x H20, which no node has. Available: .*H800 free"):
                await launcher.launch(echo(), ResourceRequest(("H20",)))
            with pytest.raises(Unsatisfiable, match="needs 3 x H800"):
                await launcher.launch(echo(), ResourceRequest(("H800",), count=3))
            only = next(node.name for node in await launcher.nodes() if "H800" in node.total)
            with pytest.raises(Unsatisfiable, match=f"needs 1 x H800, not on {only}"):
                await launcher.launch(echo(), ResourceRequest(("H800",), avoid=frozenset({only})))

    asyncio.run(main())


def test_busy_devices_are_waited_for_and_then_an_error(cluster: Cluster) -> None:
    async def main() -> None:
        async with joined(cluster, patience=0.5) as launcher:
            first = await launcher.launch(echo("first"), ResourceRequest(("H800",), count=2))
            with pytest.raises(ServiceError, match=r"after 0.5 s they are in use: .*0 of 2 H800 free"):
                await launcher.launch(echo("second"), ResourceRequest(("H800",)))
            await first.stop()
            launcher._patience = 30
            second = await launcher.launch(echo("second"), ResourceRequest(("H800",)))
            assert second.device == "H800"

    asyncio.run(main())


def test_a_start_that_fails_shows_the_end_of_its_log(cluster: Cluster, tmp_path: Path) -> None:
    async def main() -> None:
        async with joined(cluster) as launcher:
            for logs in (tmp_path, Path("/no/such/folder")):  # seen from the node, and not
                command = service_command("no_such_service", {}, name="ghost", logs=logs)
                with pytest.raises(ServiceError, match=r"(?s)ghost.log ends with:.*No module named .?no_such_service"):
                    await launcher.launch(command, ResourceRequest())
            assert "no_such_service" in (tmp_path / "ghost.log").read_text()
            shutil.rmtree(Path(tempfile.gettempdir()) / launcher._folder)

    asyncio.run(main())


def test_ranks_start_together_or_not_at_all(cluster: Cluster, tmp_path: Path) -> None:
    async def main() -> None:
        async with joined(cluster) as launcher:
            with extra_node(cluster, "H20"):
                ranks = [echo(f"rank-{number}") for number in range(2)]
                started = await launcher.launch_together(ranks, ResourceRequest(("H20", "H800")))
                assert [rank.device for rank in started] == ["H20", "H20"]
                assert len({rank.node for rank in started}) == 1
                await asyncio.gather(*(rank.stop() for rank in started))
                bad = service_command("no_such_service", {}, name="ghost", logs=tmp_path)
                with pytest.raises(ServiceError, match="no_such_service"):
                    await launcher.launch_together([echo("good"), bad], ResourceRequest(("H20",)))
                with pytest.raises(Unsatisfiable, match="rank-0 and rank-1 and rank-2 needs 1 x H800"):
                    await launcher.launch_together([*ranks, echo("rank-2")], ResourceRequest(("H800",)))
                both = await launcher.launch(echo(), ResourceRequest(("H20",), count=2))  # nothing is reserved any more
                assert both.device == "H20"

    asyncio.run(main())


def test_a_killed_node_is_noticed_and_its_service_starts_on_another(cluster: Cluster) -> None:
    async def main() -> None:
        async with joined(cluster) as launcher:
            request = ResourceRequest(("H20", "H800"))
            with extra_node(cluster, "H20") as node:
                started = await launcher.launch(echo(), request)
                assert started.device == "H20"
                process = psutil.Process(started.pid)
                cluster.remove_node(node, allow_graceful=False)
                reason = await started.wait()
                assert started.node_lost
                assert f"echo was lost with its node {started.node}" in reason
                process.wait(timeout=30)
                again = await relaunch(launcher, echo(), request, started)
                assert again.device == "H800"

    asyncio.run(main())


def test_a_killed_process_is_not_taken_for_a_lost_node(cluster: Cluster) -> None:
    async def main() -> None:
        async with joined(cluster) as launcher:
            started = await launcher.launch(echo(), ResourceRequest())
            os.kill(started.pid, signal.SIGKILL)
            assert "echo ended with signal SIGKILL" in await started.wait()
            assert not started.node_lost
            again = await relaunch(launcher, echo(), ResourceRequest(), started)
            again.kill()
            assert "echo ended with signal SIGKILL" in await again.wait()

    asyncio.run(main())


def test_nothing_outlives_a_controller_killed_at_once(cluster: Cluster) -> None:
    script = Path(__file__).with_name("ray_controller_script.py")
    controller = subprocess.Popen([sys.executable, script, cluster.address], stdout=subprocess.PIPE, text=True)
    try:
        assert controller.stdout
        process = psutil.Process(int(controller.stdout.readline()))
    finally:
        controller.kill()
        controller.communicate()
    process.wait(timeout=60)


def test_launches_that_list_the_nodes_at_the_same_time_share_a_list() -> None:
    class Counted(RayLauncher):
        listings = 0

        async def _list(self) -> list[RayNode]:
            self.listings += 1
            await asyncio.sleep(0)
            return []

    async def main() -> None:
        launcher = Counted("nowhere:1")
        await asyncio.gather(*(launcher.nodes() for _ in range(3000)))
        assert launcher.listings == 1
        await launcher.nodes()
        assert launcher.listings == 2

    asyncio.run(main())


def test_a_missing_cluster_is_a_readable_error() -> None:
    with pytest.raises(ServiceError, match=r"no Ray cluster answers at 127.0.0.1:9 .* is `ray start --head` running"):
        asyncio.run(RayLauncher("127.0.0.1:9").nodes())


def test_environments_of_a_killed_node_move_to_other_hosts(cluster: Cluster) -> None:
    lake = TaskConfig(name="lake", env="rollart.envs.frozen_lake:FrozenLake", isolation="process")
    changes = []

    async def main() -> None:
        async with joined(cluster) as launcher:
            with extra_node(cluster, "H20") as node:
                environments = EnvironmentPool(
                    *([lake], EnvironmentsConfig(processes=4, retries=3)),
                    launcher=launcher,
                    requests=[ResourceRequest(("H20", "H800")), ResourceRequest(("cpu",))],
                    on_host_change=lambda started, reason: changes.append((started.device, reason)),
                )
                try:
                    await environments.start()
                    await play(environments, node)
                finally:
                    await environments.close()

    async def play(environments: EnvironmentPool, node: Any) -> None:
        async with contextlib.AsyncExitStack() as stack:
            claims = [await stack.enter_async_context(environments.claim("lake", held_out=False)) for _ in range(4)]
            await asyncio.gather(*(claim.reset(1) for claim in claims))
            cluster.remove_node(node, allow_graceful=False)
            steps = await asyncio.gather(*(until_lost(claim) for claim in claims))
            assert sum(steps) == 2  # those on the node that is gone
            await asyncio.gather(*(claim.reset(2) for claim in claims))

    async def until_lost(claim: Any) -> bool:
        try:
            while not any(reason for _, reason in changes):
                await claim.step("?")
            await claim.step("?")
        except EnvironmentFailed:
            return True
        return False

    asyncio.run(main())
    assert sorted(device for device, reason in changes if not reason) == ["H20", "H800", "cpu"]
    assert [device for device, reason in changes if reason] == ["H20"]


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    time.sleep(0.1)
    return False


THROUGH_A_CLIENT = """
import asyncio, json, sys
from rollart.launch.launcher import Command, ResourceRequest
from rollart.launch.ray import RayLauncher
from rollart.launch import rpc

async def main(address, services):
    launcher = RayLauncher(address)
    try:
        async with asyncio.timeout(90):
            command = Command("echo", ("-m", "echo_service"), {"word": "hello"}, environment={"PYTHONPATH": services})
            started = await launcher.launch(command, ResourceRequest(("H800",)))
            async with rpc.connected(started.answer["url"], key=launcher.key) as client:
                word = await client.call("word", returns=str, deadline=10)
            print(json.dumps([started.device, word, sorted(d for node in await launcher.nodes() for d in node.total)]))
    finally:
        await launcher.close()

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_cluster_is_joined_from_outside_through_its_client_port(cluster: Cluster) -> None:
    port = free_port("127.0.0.1")
    # Without Ray's own proxy before it, which now and then finds the server that it starts dead at birth.
    serve = [sys.executable, "-m", "ray.util.client.server", "--mode", "legacy", "--address", cluster.address]
    server = subprocess.Popen([*serve, "--host", "127.0.0.1", "--port", str(port)], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not listens(port):
            assert server.poll() is None and time.monotonic() < deadline
        outside = [sys.executable, "-c", THROUGH_A_CLIENT, f"ray://127.0.0.1:{port}", SERVICES]
        output = subprocess.run(outside, capture_output=True, text=True, timeout=150, check=True).stdout
        device, word, classes = json.loads(output.splitlines()[-1])
        assert (device, word) == ("H800", "hello")
        assert {"H800", "cpu"} <= set(classes)  # nodes that other tests killed may still be listed
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
