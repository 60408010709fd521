from tiny_decoders import request

from rollart.engines.torch.batch import Chunk
from rollart.engines.torch.sequence import EngineSequence, accepted
from rollart.engines.torch.swap_cost import MAX_SESSIONS, SwapCost


def sequence(name: str, *, lost: int = 0) -> EngineSequence:
    made = accepted(request(name, [1, 2, 3], max_tokens=4), vocabulary=10, context=100, seed=0)
    made.lost = lost
    return made


def test_a_step_costs_what_it_takes_beyond_decoding_for_the_tokens_that_were_there_before() -> None:
    cost = SwapCost()
    running = [sequence("decodes"), sequence("anew", lost=30), sequence("new")]
    cost.record_step(running, 3, [], 1.5)
    cost.record_step(running, 1, [Chunk(1, 20, 15), Chunk(2, 0, 5)], 2.5)
    assert cost.record_swap({}) == (2.5 - 0.5) * 10 / 20
    cost.record_step(running, 1, [Chunk(1, 35, 15)], 2.0)
    assert cost.record_swap({}) == 0.0


def test_the_speed_of_decoding_is_that_of_the_last_steps() -> None:
    cost, running = SwapCost(), [sequence("anew", lost=30)]
    for seconds in (1.0, 3.0):
        cost.record_step(running, 1, [], seconds)
    cost.record_step(running, 1, [Chunk(0, 0, 10)], 5.0)
    assert cost.record_swap({}) == 5.0 - 2.0
    cost.record_step(running, 4, [Chunk(0, 0, 10)], 5.0)  # decoding alone would have taken longer
    assert cost.record_swap({}) == 0.0


def test_a_session_has_lost_what_it_had_once() -> None:
    cost, back = SwapCost(), sequence("a")
    cost.record_swap({back.session: 40})
    cost.mark_lost(back)
    assert back.lost == 40
    again = sequence("a")
    cost.mark_lost(again)
    assert again.lost == 0


def test_sessions_that_never_come_back_are_forgotten_in_the_end() -> None:
    cost = SwapCost()
    cost.record_swap({"first": 1})
    cost.record_swap({f"s{number}": 1 for number in range(MAX_SESSIONS)})
    late = sequence("first")
    late.session = "first"
    cost.mark_lost(late)
    assert late.lost == 0


def test_waiting_for_a_swap_costs_the_free_rows_and_is_reported_once() -> None:
    cost = SwapCost()
    cost.record_drain(0.25, 2.0)
    cost.record_drain(1.0, 1.0)
    assert cost.take_drain_s() == 1.5
    assert cost.take_drain_s() == 0.0
