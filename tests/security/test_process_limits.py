"""Environments that take more than their share of the machine."""

import asyncio
import os
from pathlib import Path

import pytest

from rollart.config import EnvironmentsConfig, ProcessLimitsConfig, TaskConfig
from rollart.core.errors import EnvironmentFailed
from rollart.envs.single import single_environment
from rollart.workers.process_limits import MB, Groups, ProcessLimits

LIMITS = ProcessLimitsConfig(memory=200, processes=8, file=32, log=4)
TASK = TaskConfig(name="t", env="attackers:Greedy")


def take(what: str, log: Path | None = None) -> None:
    async def body() -> None:
        config = EnvironmentsConfig(limits=LIMITS, step_deadline=30.0)
        async with single_environment(TASK, config, log) as environment:
            await environment.reset(0, held_out=False)
            await environment.step(what)

    asyncio.run(body())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("memory", r"MemoryError.*; the limit is 200 MB of memory"),
        ("memory_of_children", "the process was killed: it used more than 200 MB of memory"),
        ("processes", "the process was killed: it had more than 8 processes"),
        ("file", r"File too large.*; the limit is 32 MB for a file"),
    ],
)
def test_an_environment_that_takes_too_much_fails_with_the_limit_as_the_reason(what: str, reason: str) -> None:
    with pytest.raises(EnvironmentFailed, match=reason):
        take(what)


@pytest.mark.slow
def test_an_environment_cannot_fill_the_disk_with_its_log(tmp_path: Path) -> None:
    take("log", tmp_path / "env.log")
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"env.log", "env.log.1"} and sum(sizes.values()) <= 2 * 4 * MB
    assert (tmp_path / "env.log.1").read_text().endswith("x" * 1023 + "\n"), "the newest lines are kept"


def test_every_process_of_foreign_code_has_limits_unless_the_run_file_lifts_them() -> None:
    defaults = EnvironmentsConfig().limits
    assert min(defaults.memory, defaults.processes, defaults.file, defaults.log) > 0


def test_a_control_group_is_made_where_memory_and_processes_are_handed_on(tmp_path: Path) -> None:
    """The files of a delegated cgroup v2; the kernel behind them is not there on every machine that runs tests."""
    own = tmp_path / "own"
    own.write_text("1:memory:/x\n0::/user/run\n")
    parent = tmp_path / "cgroups" / "user"
    (parent / "run").mkdir(parents=True)
    (parent / "run" / "cgroup.subtree_control").write_text("")
    (parent / "cgroup.subtree_control").write_text("cpu memory\n")
    assert Groups.find(tmp_path / "cgroups", own) is None
    (parent / "cgroup.subtree_control").write_text("cpu memory pids\n")
    groups = Groups.find(tmp_path / "cgroups", own)
    limits = ProcessLimits(memory=100, processes=7)
    assert groups is not None
    groups.add(1234, limits)
    group = parent / f"rollart-{os.getpid()}-1"
    assert (group / "memory.max").read_text() == str(100 * MB) and (group / "pids.max").read_text() == "7"
    assert (group / "cgroup.procs").read_text() == "1234"
    assert groups.broken(1234, limits) == ""
    (group / "memory.events").write_text("high 0\noom 2\noom_kill 1\n")
    assert "more than 100 MB of memory" in groups.broken(1234, limits)
