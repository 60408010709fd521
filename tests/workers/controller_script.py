"""A controller to be killed: prints the process ids of its host, a slot and what the slot started, then waits."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rollart.workers.process import HostSpec
from rollart.workers.slots import SlotPool


async def main() -> None:
    pool = SlotPool(HostSpec("hostile_target:Target"), limit=2)
    async with pool.lease() as lease:
        await lease.take()
        pids = await lease.call("breed", {}, 30)
        print(pool.host_pids[0], *pids, flush=True)
        await lease.call("hang", {}, 3600)


asyncio.run(main())
