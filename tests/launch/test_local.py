"""Real child processes."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rollart.core.errors import ServiceError
from rollart.hardware.gpus import class_of
from rollart.launch import rpc
from rollart.launch.launcher import Command, ResourceRequest, Unsatisfiable, relaunch, service_command
from rollart.launch.local import LocalLauncher

SERVICES = str(Path(__file__).parent)
MIRROR = """
import json, os, sys
spec = json.loads(sys.stdin.readline())
print(json.dumps({"spec": spec, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}), flush=True)
sys.stdin.read()
"""


def execute(test: Callable[[LocalLauncher], Awaitable[None]], devices: tuple[str, ...] = ()) -> None:
    async def main() -> None:
        launcher = LocalLauncher(devices)
        try:
            async with asyncio.timeout(60):
                await test(launcher)
        finally:
            await launcher.close()

    asyncio.run(main())


def echo(logs: Path) -> Command:
    command = service_command("echo_service", {"word": "hello"}, name="echo", logs=logs)
    return replace(command, environment={**command.environment, "PYTHONPATH": SERVICES})


def mirror(name: str = "mirror") -> Command:
    """Answers with its spec."""
    return Command(name, ("-c", MIRROR), {"own": 1})


async def expected(launcher: LocalLauncher, command: Command) -> int:
    """The process that was spawned for it."""
    before = {child.pid for child in psutil.Process().children()}
    await launcher.expect(command)
    (spawned,) = {child.pid for child in psutil.Process().children()} - before
    return spawned


def test_what_was_expected_is_launched_in_the_process_that_was_spawned_for_it() -> None:
    async def check(launcher: LocalLauncher) -> None:
        spawned = await expected(launcher, replace(mirror(), spec={}))
        started = await launcher.launch(mirror(), ResourceRequest())
        assert (started.pid, started.answer["spec"]["own"]) == (spawned, 1)
        again = await launcher.launch(mirror(), ResourceRequest())
        assert again.pid != spawned

    execute(check)


def test_an_expected_process_that_was_killed_is_spawned_again() -> None:
    async def check(launcher: LocalLauncher) -> None:
        os.kill(await expected(launcher, mirror()), signal.SIGKILL)
        started = await launcher.launch(mirror(), ResourceRequest())
        assert started.answer["spec"]["own"] == 1

    execute(check)


def test_an_expected_process_of_another_kind_or_without_a_launch_is_ended() -> None:
    async def check(launcher: LocalLauncher) -> None:
        spawned = await expected(launcher, mirror())
        started = await launcher.launch(replace(mirror(), environment={"OMP_NUM_THREADS": "7"}), ResourceRequest())
        assert started.pid != spawned
        assert not psutil.pid_exists(spawned)
        waiting = await expected(launcher, mirror("another"))
        await launcher.close()
        assert not psutil.pid_exists(waiting)

    execute(check)


def test_what_a_library_prints_before_the_answer_goes_to_the_log(tmp_path: Path) -> None:
    async def check(launcher: LocalLauncher) -> None:
        chatty = "print('Welcome to libnoise 1.0')\nprint(42)\nprint('x' * 200_000)\n" + MIRROR
        command = Command("chatty", ("-c", chatty), {"own": 1}, log=tmp_path / "chatty.log")
        started = await launcher.launch(command, ResourceRequest())
        assert started.answer["spec"]["own"] == 1
        assert (tmp_path / "chatty.log").read_text().startswith("Welcome to libnoise 1.0\n42\n")

    execute(check)


def test_a_service_answers_only_those_who_have_the_key(tmp_path: Path) -> None:
    async def check(launcher: LocalLauncher) -> None:
        started = await launcher.launch(echo(tmp_path), ResourceRequest())
        assert (started.node, started.device) == ((await launcher.nodes())[0].name, "cpu")
        for key in (None, "wrong", "schlüssel"):
            with pytest.raises(ServiceError, match="it needs the key of the run"):
                await rpc.connect(started.answer["url"], key=key)
        async with rpc.connected(started.answer["url"], key=launcher.key) as client:
            assert await client.call("word", returns=str, deadline=10) == "hello"
        process = psutil.Process(started.pid)
        assert launcher.key not in " ".join([*process.cmdline(), *process.environ().values()])

    execute(check)


def test_a_launcher_ends_what_it_started_when_it_closes() -> None:
    pids = []

    async def check(launcher: LocalLauncher) -> None:
        pids.extend([(await launcher.launch(mirror(), ResourceRequest())).pid for _ in range(2)])
        assert all(map(psutil.pid_exists, pids))

    execute(check)
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))


def test_all_who_wait_for_a_command_get_the_reason_of_its_end(tmp_path: Path) -> None:
    async def check(launcher: LocalLauncher) -> None:
        started = await launcher.launch(echo(tmp_path), ResourceRequest())
        waiting = [asyncio.create_task(started.wait()) for _ in range(2)]
        os.kill(started.pid, signal.SIGKILL)
        assert {*await asyncio.gather(*waiting), await started.wait()} == {"echo ended with signal SIGKILL"}
        again = await relaunch(launcher, echo(tmp_path), ResourceRequest(), started)
        assert again.pid != started.pid

    execute(check)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (Command("x", (), {}, python="/no/such/python"), "could not start x: /no/such/python cannot be run"),
        (Command("x", (), {}, python="/bin/false"), "/bin/false ended while it started, with exit code 1"),
        (
            Command("x", ("-c", "input(); input()"), {}, start_deadline=0.2, start_key="engine.start_deadline"),
            "x did not start within 0.2 s; raise engine.start_deadline in the run file",
        ),
        (Command("x", ("-c", 'print(\'{"error": "no disk"}\')'), {}), "^no disk$"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_no_process(command: Command, reason: str) -> None:
    async def check(launcher: LocalLauncher) -> None:
        with pytest.raises(ServiceError, match=reason):
            await launcher.launch(command, ResourceRequest())
        assert not [
            child for child in psutil.Process().children() if command.argv and command.argv[1] in child.cmdline()
        ]

    execute(check)


def test_the_end_of_the_log_is_part_of_a_failed_start(tmp_path: Path) -> None:
    async def check(launcher: LocalLauncher) -> None:
        command = service_command("no_such_service", {}, name="ghost", logs=tmp_path)
        with pytest.raises(ServiceError, match=r"(?s)ghost.log ends with:.*No module named .?no_such_service"):
            await launcher.launch(command, ResourceRequest())

    execute(check)


def test_a_class_that_is_not_here_is_refused_with_what_there_is() -> None:
    async def check(launcher: LocalLauncher) -> None:
        with pytest.raises(Unsatisfiable, match=r"mirror needs 1 x H800 or H20, which no node has. Available: .* cpu"):
            await launcher.launch(mirror(), ResourceRequest(("H800", "H20")))
        here = (await launcher.nodes())[0].name
        with pytest.raises(Unsatisfiable, match=f"not on {here}"):
            await launcher.launch(mirror(), ResourceRequest(avoid=frozenset({here})))
        started = await launcher.launch(mirror(), ResourceRequest(("H800", "cpu"), count=1000))
        assert started.device == "cpu"

    execute(check)


def test_a_gpu_belongs_to_one_command_until_it_ends() -> None:
    async def check(launcher: LocalLauncher) -> None:
        first = await launcher.launch(mirror("first"), ResourceRequest(("H20",), count=2))
        assert first.answer["gpus"] == "1,2"
        with pytest.raises(ServiceError, match=r"second needs 1 x H20, but they are in use: .*0 of 2 H20 free"):
            await launcher.launch(mirror("second"), ResourceRequest(("H20",)))
        with pytest.raises(Unsatisfiable, match="needs 3 x H20"):
            await launcher.launch(mirror("third"), ResourceRequest(("H20",), count=3))
        await first.stop()
        halves = [await launcher.launch(mirror("half"), ResourceRequest(("H20",), count=0.5)) for _ in range(3)]
        assert [half.answer["gpus"] for half in halves] == ["1", "1", "2"]
        assert (await launcher.nodes())[0].free == {"cpu": os.cpu_count(), "H800": 1, "H20": 0.5}

    execute(check, ("H800", "H20", "H20"))


def test_commands_that_start_together_know_their_rank_and_where_to_meet() -> None:
    async def check(launcher: LocalLauncher) -> None:
        started = await launcher.launch_together([mirror(f"rank-{n}") for n in range(2)], ResourceRequest())
        specs = [rank.answer["spec"] for rank in started]
        assert [(spec["rank"], spec["world"], spec["own"]) for spec in specs] == [(0, 2, 1), (1, 2, 1)]
        assert specs[0]["rendezvous"] == specs[1]["rendezvous"]
        assert specs[0]["rendezvous"].startswith("127.0.0.1:")

    execute(check)


@pytest.mark.parametrize(
    "other", [mirror(), Command("waits for the others", ("-c", "import sys; sys.stdin.read()"), {})]
)
def test_commands_start_together_or_not_at_all(other: Command) -> None:
    async def check(launcher: LocalLauncher) -> None:
        before = set(psutil.Process().children())
        with pytest.raises(ServiceError, match="/bin/false"):
            await launcher.launch_together([other, Command("bad", (), {}, python="/bin/false")], ResourceRequest())
        assert set(psutil.Process().children()) <= before

    execute(check)


@pytest.mark.parametrize(
    ("product", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA GeForce RTX 4090", "GeForce-RTX-4090"),
    ],
)
def test_a_gpu_is_of_the_class_that_its_product_names(product: str, device: str) -> None:
    assert class_of(product) == device


def test_a_service_that_is_started_again_has_the_port_that_its_spec_names(tmp_path: Path) -> None:
    async def check(launcher: LocalLauncher) -> None:
        first = await launcher.launch(echo(tmp_path), ResourceRequest())
        port = int(str(first.answer["url"]).rpartition(":")[2])
        async with rpc.connected(str(first.answer["url"]), key=launcher.key):
            first.kill()  # its end of the connection lingers
            await first.wait()
        again = replace(echo(tmp_path), spec={"word": "hello", "port": port})
        assert (await launcher.launch(again, ResourceRequest())).answer["url"] == first.answer["url"]

    execute(check)
