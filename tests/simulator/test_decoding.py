import asyncio
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from rollart.core.types import GenerationRequest, Sampling
from rollart.simulator.decoding import DecodingBatch, SimulatedSequence


def sequence(wanted: int) -> SimulatedSequence:
    request = GenerationRequest("a/0", "a", "task", 0, [], Sampling())
    return SimulatedSequence(request, cast("asyncio.Future[Any]", None), 0, 0, wanted, "stop", 0.0)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 100), st.booleans()), max_size=30))
def test_sequences_end_after_their_tokens_unless_they_left(
    arrivals: list[tuple[int, int, bool]],
) -> None:
    batch, due, ended = DecodingBatch(), {}, {}
    for gap, wanted, leaves in arrivals:
        batch.advance(gap)
        ended |= {each.order: batch.steps for each in batch.pop_ended()}
        one = sequence(wanted)
        batch.join(one, wanted)
        if leaves:
            batch.leave(one)
        else:
            due[one.order] = batch.steps + wanted
    while (end := batch.next_end()) is not None:
        batch.advance(end - batch.steps)
        ended |= {each.order: batch.steps for each in batch.pop_ended()}
    assert ended.keys() == due.keys() and batch.count == 0 and batch.context == 0.0
    assert all(due[order] <= at <= due[order] + 50 for order, at in ended.items())


def test_last_skips_sequences_that_have_left() -> None:
    batch, first, second = DecodingBatch(), sequence(10), sequence(10)
    batch.join(first, 10)
    batch.join(second, 10)
    batch.leave(second)
    assert batch.last() is first


def test_a_long_sequence_records_all_its_versions_and_old_swaps_are_dropped() -> None:
    batch, long = DecodingBatch(), sequence(10_000)
    for version in range(1, 1_000):
        batch.swap(version)
        batch.advance(1)
    batch.join(long, 10_000)
    for version in range(1_000, 1_200):
        batch.advance(2)
        batch.swap(version)
    batch.record_versions(long)
    assert long.spans == [(version, 2) for version in range(999, 1_199)]
    batch.leave(long)
    batch.swap(1_200)
    assert len(batch._swaps) < 100


def test_a_sequence_without_a_swap_has_the_version_it_joined() -> None:
    batch, one = DecodingBatch(), sequence(8)
    batch.swap(3)
    batch.join(one, 8)
    batch.advance(8)
    batch.record_versions(one)
    assert one.spans == [(3, 8)]
