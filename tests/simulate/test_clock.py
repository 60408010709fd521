import asyncio

import pytest

from rollart.simulate.clock import NothingLeft, run


def test_sleeping_costs_no_time_but_moves_the_clock() -> None:
    async def main() -> float:
        await asyncio.gather(*(asyncio.sleep(3600 * n) for n in range(100)))
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(3600 * 99)


def test_timers_fire_in_order_of_time_then_of_creation() -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def one(number: int, delay: float) -> None:
            await asyncio.sleep(delay)
            order.append(number)

        await asyncio.gather(one(0, 2.0), one(1, 1.0), one(2, 1.0), one(3, 0.5))
        return order

    assert run(main()) == [3, 1, 2, 0]


def test_a_program_that_would_hang_for_ever_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingLeft):
        run(main())
