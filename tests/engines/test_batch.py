from hypothesis import given
from hypothesis import strategies as st
from tiny_decoders import request

from rollart.engines.torch.batch import BatchState
from rollart.engines.torch.sequence import EngineSequence, accepted


def made(name: int, length: int) -> EngineSequence:
    return accepted(request(str(name), [1] * length, max_tokens=50), vocabulary=2, context=999, seed=0)


def play(batch: BatchState, rows: list[EngineSequence], budget: int) -> None:
    """One step as the stepper does it, on a list that stands for the KV rows."""
    chunks = batch.chunks(budget)
    assert sum(chunk.count for chunk in chunks) <= budget
    for row in range(batch.decoding):
        assert batch.running[row].pending == 1
        batch.running[row].computed += 1
        batch.running[row].tokens.append(1)
    for chunk in chunks:
        sequence = batch.running[chunk.row]
        assert chunk.start == sequence.computed and rows[chunk.row] is sequence
        sequence.computed += chunk.count
        if sequence.pending == 0:
            sequence.tokens.append(1)
    batch.settle()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(1, 30)),
        st.tuples(st.just("leave"), st.integers(0, 99)),
        st.tuples(st.just("step"), st.integers(1, 40)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=60,
)


@given(actions)
def test_rows_stay_dense_with_decoding_ones_first_whatever_happens(script: list[tuple[str, int]]) -> None:
    batch = BatchState()
    rows: list[EngineSequence] = []
    for number, (action, value) in enumerate(script):
        if action == "admit":
            sequence = batch.waiting.popleft() if batch.waiting else made(number, value)
            assert batch.admit(sequence) == len(rows)
            rows.append(sequence)
            batch.settle()
        elif action == "leave" and batch.running:
            gone = batch.running[value % batch.size]
            for move in batch.remove(value % batch.size):
                rows[move.target] = rows[move.source]
            rows.pop()
            assert gone not in batch.running
        elif action == "step" and batch.running:
            play(batch, rows, value)
        elif action == "restart":
            order = list(batch.running)
            batch.restart()
            assert list(batch.waiting)[: len(order)] == order and not batch.running
            rows = []
        assert rows == batch.running
        assert all(sequence.pending == 1 for sequence in batch.running[: batch.decoding])


def test_prefill_goes_in_row_order_and_stops_at_the_budget() -> None:
    batch = BatchState()
    for name, length in enumerate((10, 10, 10)):
        batch.admit(made(name, length))
    assert [(chunk.row, chunk.start, chunk.count) for chunk in batch.chunks(15)] == [(0, 0, 10), (1, 0, 5)]
    assert batch.prefilling == 30


def test_who_ran_waits_before_the_others_after_a_restart() -> None:
    batch = BatchState()
    early, late = made(1, 5), made(2, 5)
    batch.admit(early)
    batch.waiting.append(late)
    batch.restart()
    assert list(batch.waiting) == [early, late] and early.computed == 0
