"""A controller to be killed: prints the process id of a command that it started on a Ray cluster, then waits."""

import asyncio
import sys

from rollart.launch.launcher import Command, ResourceRequest
from rollart.launch.ray import RayLauncher

READY = "import sys; sys.stdin.readline(); print('{}', flush=True); sys.stdin.read()"


async def main() -> None:
    started = await RayLauncher(sys.argv[1]).launch(Command("waiting", ("-c", READY), {}), ResourceRequest())
    print(started.pid, flush=True)
    await started.wait()


asyncio.run(main())
