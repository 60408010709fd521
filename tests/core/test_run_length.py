from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rollart.core.run_length import RunLength, fingerprint, frozen, joined, lowest

spans = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=5)


def runs_of(pairs: list[tuple[int, int]]) -> RunLength:
    whole = RunLength.of(*pairs[0])
    for value, count in pairs[1:]:
        whole = whole + RunLength.of(value, count)
    return whole


@given(spans)
def test_runs_are_the_list_they_stand_for(pairs: list[tuple[int, int]]) -> None:
    plain = [value for value, count in pairs for _ in range(count)]
    compact = runs_of(pairs)
    assert list(compact) == plain and len(compact) == len(plain)
    assert compact[-1] == plain[-1] and lowest(compact) == lowest(plain)


@given(spans)
def test_equal_numbers_in_a_row_are_stored_once(pairs: list[tuple[int, int]]) -> None:
    values = [value for value, _ in runs_of(pairs).spans]
    assert all(one != other for one, other in pairwise(values))


def test_a_list_grows_in_place_and_runs_replace_an_empty_one() -> None:
    context = [1]
    assert joined(context, [2, 3]) is context == [1, 2, 3]
    more = RunLength.of(0, 5)
    assert joined([], more) is more  # type: ignore[arg-type, comparison-overlap]


def test_lists_are_frozen_as_tuples_and_runs_unchanged() -> None:
    compact = RunLength.of(1, 2)
    assert frozen([1, 2]) == (1, 2)
    assert frozen(compact) is compact  # type: ignore[arg-type, comparison-overlap]


def test_only_equal_sequences_share_a_fingerprint() -> None:
    assert fingerprint([1, 2]) == fingerprint([1, 2]) != fingerprint([2, 1])
    assert fingerprint(RunLength.of(7, 3)) == fingerprint(RunLength.of(7, 3)) != fingerprint(RunLength.of(8, 3))  # type: ignore[arg-type]
