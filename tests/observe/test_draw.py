import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rollart.observe.draw import bar, clock, count, fit, span, sparkline, stacked, table


def test_a_sparkline_spans_low_to_high_and_averages_what_does_not_fit() -> None:
    assert sparkline([0, 0.5, 1], 10) == "▁▅█" or sparkline([0, 0.5, 1], 10) == "▁▄█"
    assert sparkline([0.0, 1.0] * 50, 10) == sparkline([0.5], 1) * 10
    assert sparkline([0.0] * 50 + [1.0] * 50, 2) == "▁█"
    assert sparkline([2, 2], 5, low=2, high=2) == "▁▁"


@given(st.floats(-1, 2), st.integers(1, 50))
def test_a_bar_is_exactly_as_wide_as_asked(share: float, width: int) -> None:
    assert len(bar(share, width, "red").plain) == width


@given(st.lists(st.integers(0, 99), min_size=4, max_size=4), st.integers(1, 60))
def test_a_stacked_bar_is_exactly_as_wide_as_asked(values: list[int], width: int) -> None:
    parts = dict(zip("abcd", values, strict=True))
    text = stacked(parts, dict.fromkeys("abcd", "red"), width).plain
    assert len(text) == width
    assert (set(text) == {"─"}) == (not any(values))


def test_the_parts_of_a_stacked_bar_differ_without_colour() -> None:
    text = stacked(dict.fromkeys("abcdefg", 1.0), dict.fromkeys("abcdefg", "red"), 7).plain
    assert len(set(text)) == 7


def test_a_narrow_table_folds_names_and_cuts_no_number() -> None:
    rows = table("name", "by", "swaps", "transfer")
    rows.add_row("an-engine-with-a-long-name", "shared memory", "123", "45.6 ms")
    console = Console(width=40, record=True, file=io.StringIO())
    console.print(rows)
    shown = console.export_text()
    assert "…" not in shown and all(word in shown for word in ("swaps", "transfer", "123", "45.6 ms"))


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
