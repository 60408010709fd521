from hypothesis import given
from hypothesis import strategies as st

from rollart.weights.server import FanOut, ancestors


@given(st.integers(0, 500), st.integers(1, 5))
def test_every_reader_fetches_from_an_earlier_one(position: int, fan_out: int) -> None:
    above = ancestors(position, fan_out)
    assert all(later > earlier for later, earlier in zip([position, *above], above, strict=False))
    assert (not above) == (position < fan_out)


@given(st.integers(1, 300), st.integers(1, 5))
def test_nobody_feeds_more_than_the_fan_out_the_publisher_included(members: int, fan_out: int) -> None:
    parents = [(ancestors(position, fan_out) or [-1])[0] for position in range(members)]
    assert max(parents.count(parent) for parent in set(parents)) <= fan_out


@given(st.integers(2, 2000))
def test_the_way_to_the_publisher_is_short(members: int) -> None:
    assert len(ancestors(members - 1)) <= members.bit_length()


def test_who_begins_again_keeps_its_place_and_who_cannot_serve_feeds_nobody() -> None:
    tree = FanOut(fan_out=1)
    assert list(tree.join("a")) == []
    assert list(tree.join("")) == ["a"]
    assert list(tree.join("b")) == ["a"]
    assert list(tree.join("a")) == []
    assert list(tree.join("c")) == ["b", "a"]
