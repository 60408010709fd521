import asyncio
import os
import signal

import psutil

from rollart.launch.child import Child
from rollart.launch.launcher import Command

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
