import asyncio

from rollart.rollout.lockstep import Lockstep
from rollart.simulator import clock


async def _turns(lockstep: Lockstep, task: str, seconds: list[float], ends: list[tuple[str, float]]) -> None:
    barrier = lockstep.barrier(task)
    with barrier.member():
        await asyncio.sleep(0)  # until all have joined
        for each in seconds:
            await barrier.wait()
            await asyncio.sleep(each)
    ends.append((task, asyncio.get_running_loop().time()))


def test_turns_of_a_task_wait_for_its_slowest_member_and_for_no_other_task() -> None:
    async def play() -> list[tuple[str, float]]:
        lockstep = Lockstep()
        ends: list[tuple[str, float]] = []
        await asyncio.gather(
            _turns(lockstep, "short", [1.0, 3.0], ends),
            _turns(lockstep, "short", [2.0, 1.0], ends),
            _turns(lockstep, "long", [50.0], ends),
        )
        return ends

    assert clock.run(play()) == [("short", 3.0), ("short", 5.0), ("long", 50.0)]


def test_a_member_that_leaves_keeps_nobody_waiting() -> None:
    async def play() -> list[tuple[str, float]]:
        lockstep = Lockstep()
        ends: list[tuple[str, float]] = []
        await asyncio.gather(_turns(lockstep, "task", [4.0], ends), _turns(lockstep, "task", [1.0, 1.0], ends))
        return ends

    assert clock.run(play()) == [("task", 4.0), ("task", 5.0)]
