import asyncio

import pytest

from rollart.simulator.clock import Deadlock, run


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


def test_a_program_that_would_hang_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(main())


def test_cancelled_timers_never_fire_and_are_removed() -> None:
    async def main() -> tuple[list[int], float]:
        loop, fired = asyncio.get_running_loop(), list[int]()
        timers = [loop.call_later(1 + number, fired.append, number) for number in range(5_000)]
        for timer in timers[1:]:
            timer.cancel()
        await asyncio.sleep(2)
        return fired, loop.time()

    assert run(main()) == ([0], 2.0)


def test_a_cancelled_sleep_ends_at_once() -> None:
    async def main() -> float:
        sleeper = asyncio.create_task(asyncio.sleep(100))
        await asyncio.sleep(1)
        sleeper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeper
        return asyncio.get_running_loop().time()

    assert run(main()) == 1.0


def test_a_callback_that_fails_is_reported_and_the_others_run() -> None:
    async def main() -> tuple[list[str], list[int]]:
        loop, reported, ran = asyncio.get_running_loop(), list[str](), list[int]()
        loop.set_exception_handler(lambda loop, context: reported.append(repr(context["exception"])))
        loop.call_later(1, lambda: 1 / 0)
        loop.call_later(1, ran.append, 1)
        await asyncio.sleep(2)
        return reported, ran

    assert run(main()) == (["ZeroDivisionError('division by zero')"], [1])
