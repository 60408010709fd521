from tiny_decoders import request

from rollart.engines.torch.batch import Chunk
from rollart.engines.torch.sequence import Sequence, accepted
from rollart.engines.torch.swap_cost import REMEMBERED, Losses


def sequence(name: str, *, lost: int = 0) -> Sequence:
    made = accepted(request(name, [1, 2, 3], max_tokens=4), vocabulary=10, context=100, seed=0)
    made.lost = lost
    return made


def test_a_step_costs_what_it_takes_beyond_decoding_for_the_tokens_that_were_there_before() -> None:
    losses = Losses()
    running = [sequence("decodes"), sequence("anew", lost=30), sequence("new")]
    losses.count(running, 3, [], 1.5)
    losses.count(running, 1, [Chunk(1, 20, 15), Chunk(2, 0, 5)], 2.5)
    assert losses.swapped({}) == (2.5 - 0.5) * 10 / 20
    losses.count(running, 1, [Chunk(1, 35, 15)], 2.0)
    assert losses.swapped({}) == 0.0


def test_the_speed_of_decoding_is_that_of_the_last_steps() -> None:
    losses, running = Losses(), [sequence("anew", lost=30)]
    for seconds in (1.0, 3.0):
        losses.count(running, 1, [], seconds)
    losses.count(running, 1, [Chunk(0, 0, 10)], 5.0)
    assert losses.swapped({}) == 5.0 - 2.0
    losses.count(running, 4, [Chunk(0, 0, 10)], 5.0)  # decoding alone would have taken longer
    assert losses.swapped({}) == 0.0


def test_a_session_has_lost_what_it_had_once() -> None:
    losses, back = Losses(), sequence("a")
    losses.swapped({back.session: 40})
    losses.find(back)
    assert back.lost == 40
    again = sequence("a")
    losses.find(again)
    assert again.lost == 0


def test_sessions_that_never_come_back_are_forgotten_in_the_end() -> None:
    losses = Losses()
    losses.swapped({"first": 1})
    losses.swapped({f"s{number}": 1 for number in range(REMEMBERED)})
    late = sequence("first")
    late.session = "first"
    losses.find(late)
    assert late.lost == 0


def test_waiting_for_a_swap_costs_what_steps_had_free_and_is_told_once() -> None:
    losses = Losses()
    losses.emptier(0.25, 2.0)
    losses.emptier(1.0, 1.0)
    assert losses.drained() == 1.5
    assert losses.drained() == 0.0
