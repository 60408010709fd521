"""A controller to be killed: prints the process ids of its host, a process and what that started, then waits."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rollart.workers.host_handle import HostSpec
from rollart.workers.pool import ProcessPool


async def main() -> None:
    pool = ProcessPool(HostSpec("hostile_target:Target"), limit=2)
    async with pool.claim() as claim:
        await claim.acquire()
        pids = await claim.call("breed", {}, 30)
        print(pool.host_pids[0], *pids, flush=True)
        await claim.call("hang", {}, 3600)


asyncio.run(main())
