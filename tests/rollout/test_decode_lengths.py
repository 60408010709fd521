from rollart.rollout.decode_lengths import DecodeLengths


def test_an_unknown_task_is_expected_to_use_half_of_what_it_may() -> None:
    assert DecodeLengths().expected("t", 0, 100) == 50


def test_a_prior_counts_until_there_are_measurements() -> None:
    lengths = DecodeLengths({"t": 300.0})
    assert lengths.expected("t", 0, 1000) == 300
    assert lengths.expected("t", 0, 200) == 200
    for _ in range(60):
        lengths.record("t", 0, 10)
    assert lengths.expected("t", 0, 1000) < 12


def test_turns_are_measured_apart_and_unseen_ones_are_like_the_last_before() -> None:
    lengths = DecodeLengths()
    for _ in range(50):
        lengths.record("t", 0, 100)
        lengths.record("t", 1, 10)
    assert round(lengths.expected("t", 0, 1000)) == 100
    assert round(lengths.expected("t", 1, 1000)) == 10
    assert lengths.expected("t", 2, 1000) == lengths.expected("t", 1, 1000)


def test_a_task_that_changes_its_shape_is_followed() -> None:
    lengths = DecodeLengths()
    for _ in range(200):
        lengths.record("t", 0, 4)
    for _ in range(40):
        lengths.record("t", 0, 400)
    assert lengths.expected("t", 0, 1000) > 350
