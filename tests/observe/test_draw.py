import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.observe.draw import bar, clock, count, fit, span, sparkline, stacked


def test_a_sparkline_spans_low_to_high_and_keeps_both_ends() -> None:
    assert sparkline([0, 0.5, 1], 10) == "▁▅█" or sparkline([0, 0.5, 1], 10) == "▁▄█"
    thin = sparkline([0.0] + [0.5] * 98 + [1.0], 10)
    assert (len(thin), thin[0], thin[-1]) == (10, "▁", "█")
    assert sparkline([2, 2], 5, low=2, high=2) == "▁▁"


@given(st.floats(-1, 2), st.integers(1, 50))
def test_a_bar_is_exactly_as_wide_as_asked(share: float, width: int) -> None:
    assert len(bar(share, width, "red").plain) == width


@given(st.lists(st.integers(0, 99), min_size=4, max_size=4), st.integers(1, 60))
def test_a_stacked_bar_is_exactly_as_wide_as_asked(values: list[int], width: int) -> None:
    parts = dict(zip("abcd", values, strict=True))
    text = stacked(parts, dict.fromkeys("abcd", "red"), width).plain
    assert len(text) == width
    assert ("━" in text) == any(values)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (clock(None), "-"),
        (clock(59.6), "1:00"),
        (clock(3725), "1:02:05"),
        (span(0.0123), "12 ms"),
        (span(3.214), "3.21 s"),
        (span(245), "4:05"),
        (count(999), "999"),
        (count(12.34), "12.3"),
        (count(1234), "1.2k"),
        (count(3.4e6), "3.4M"),
        (fit("abc", 5), "abc  "),
        (fit("abcdef", 4), "abc…"),
    ],
)
def test_numbers_and_times_read_well(made: str, expected: str) -> None:
    assert made == expected
