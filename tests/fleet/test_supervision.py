import asyncio

import pytest

from rollart.core.errors import ServiceError
from rollart.fleet.supervision import supervised


def test_a_run_that_is_stopped_while_a_service_is_lost_stays_stopped() -> None:
    async def body() -> None:
        lost, stopping = asyncio.Event(), asyncio.Event()

        async def watch() -> None:
            await lost.wait()
            raise ServiceError("the trainer is lost")

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:  # saves what was trained, as the training loop does
                stopping.set()
                await lost.wait()

        running = asyncio.create_task(supervised(watch(), work()))
        await asyncio.sleep(0)
        running.cancel()
        await stopping.wait()
        lost.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(body())
