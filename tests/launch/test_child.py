import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollart.core.errors import ServiceError
from rollart.launch.child import Child
from rollart.launch.launcher import WITH_PARENT, Command

# A descendant whose environment shows nothing, as after it gave itself a title.
LEAVES_ONE = """
import json, subprocess, sys
sys.stdin.readline()
nothing = subprocess.DEVNULL
left = subprocess.Popen(["env", "-i", "sleep", "1000"], stdin=nothing, stdout=nothing)
print(json.dumps({"left": left.pid}), flush=True)
sys.stdin.read()
"""


def test_a_killed_child_takes_along_descendants_that_no_longer_show_its_mark() -> None:
    async def body() -> psutil.Process:
        child = await Child.start(Command("child", ("-c", LEAVES_ONE), {}), {})
        left = psutil.Process(int(child.answer["left"]))
        os.kill(child.pid, signal.SIGKILL)
        assert await asyncio.wait_for(child.wait(), 30) == "child ended with signal SIGKILL"
        return left

    left = asyncio.run(body())
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE


SLOW_START = """
import subprocess, threading
subprocess.Popen(["sleep", "1000"])
print("started", flush=True)
threading.Event().wait()
"""


def test_a_program_that_is_still_imported_ends_with_its_parent_and_so_does_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "slow_start.py").write_text(SLOW_START)
    program = subprocess.Popen(
        [sys.executable, *WITH_PARENT, "slow_start"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))},
    )
    assert program.stdin is not None and program.stdout is not None
    assert program.stdout.readline() == b"started\n"
    (sleeper,) = psutil.Process(program.pid).children()
    program.stdin.close()
    assert program.wait(30) == -signal.SIGKILL
    assert program.stdout.read() == b""  # the sleeper, which had it too, is gone
    end = time.monotonic() + 30  # a process closes its files a moment before it is a zombie
    while not ended(sleeper) and time.monotonic() < end:
        time.sleep(0.01)
    assert ended(sleeper)
    program.stdout.close()


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


KILLED_ONCE = """
import os, pathlib, signal, sys
sys.stdin.readline()
seen = pathlib.Path(sys.argv[1])
if not seen.exists():
    seen.touch()
    os.kill(os.getpid(), signal.SIGKILL)
print("{}", flush=True)
sys.stdin.read()
"""


def test_a_child_that_is_killed_while_it_starts_is_started_once_more(tmp_path: Path) -> None:
    async def body() -> None:
        child = await Child.start(Command("child", ("-c", KILLED_ONCE, str(tmp_path / "seen")), {}), {})
        await child.stop()

    asyncio.run(body())
    assert (tmp_path / "seen").exists()


def test_a_log_that_cannot_be_written_is_named_as_the_cause(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("not a folder")
    command = Command("child", ("-c", "pass"), {}, log=tmp_path / "logs" / "child.log")
    with pytest.raises(ServiceError, match="could not start child: its log cannot be written"):
        asyncio.run(Child.start(command, {}))
