import asyncio

import pytest

from rollart.workers.batching import Batcher


def test_calls_made_at_the_same_time_are_one_batch_and_later_ones_the_next():
    sent = []

    async def run():
        gate = asyncio.Event()

        async def send(items):
            sent.append(list(items))
            await gate.wait()
            return [item * 2 for item in items]

        batcher = Batcher(send, lambda: 3)
        first = [asyncio.create_task(batcher.call(number)) for number in (1, 2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        later = [asyncio.create_task(batcher.call(number)) for number in (3, 4, 5, 6)]
        later[1].cancel()
        gate.set()
        return await asyncio.gather(*first, *later, return_exceptions=True)

    results = asyncio.run(run())
    assert sent == [[1, 2], [3, 5, 6]]
    assert [result for result in results if isinstance(result, int)] == [2, 4, 6, 10, 12]


def test_an_exception_is_of_its_own_item_unless_the_batch_failed():
    async def send(items):
        if 0 in items:
            raise RuntimeError("the batch failed")
        return [ValueError(str(item)) if item % 2 else item for item in items]

    async def run():
        batcher = Batcher(send, lambda: 10)
        mixed = await asyncio.gather(batcher.call(1), batcher.call(2), return_exceptions=True)
        return mixed, await asyncio.gather(batcher.call(0), batcher.call(4), return_exceptions=True)

    (odd, even), lost = asyncio.run(run())
    assert isinstance(odd, ValueError)
    assert even == 2
    assert all(isinstance(error, RuntimeError) for error in lost)


@pytest.mark.parametrize("parallel", [1, 3])
def test_at_most_so_many_batches_are_under_way(parallel):
    most = running = 0

    async def send(items):
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return items

    async def run():
        batcher = Batcher(send, lambda: 2, parallel)
        return await asyncio.gather(*(batcher.call(number) for number in range(20)))

    assert asyncio.run(run()) == list(range(20))
    assert most == parallel
