import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollart.simulator.distributions import Distribution, draw_of, mean_of

KINDS = [
    {"normal": {"mean": 5, "sd": 2}},
    {"lognormal": {"median": 3, "sigma": 0.6}},
    {"exponential": 4},
    {"geometric": 5},
    {"uniform": [2, 9]},
    {"quantiles": [[0, 1], [0.5, 4], [1, 5]]},
    {"values": [3, 1, 2]},
    {"mixture": [{"share": 3, "of": 1.0}, {"share": 1, "of": {"uniform": [10, 20]}}]},
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: next(iter(kind)))
@given(u=st.floats(0, 1), v=st.floats(0, 1))
def test_draws_are_monotonic_in_their_uniform_number(kind: dict[str, object], u: float, v: float) -> None:
    draw = draw_of(Distribution.model_validate(kind))
    low, high = sorted((u, v))
    assert draw(low) <= draw(high)


@pytest.mark.parametrize(
    ("distribution", "mean"),
    [
        ({"normal": {"mean": 5, "sd": 2}}, 5),
        ({"lognormal": {"mean": 7, "sigma": 0.5}}, 7),
        ({"exponential": 4}, 4),
        ({"geometric": 5}, 5),
        ({"mixture": [{"share": 3, "of": 1.0}, {"share": 1, "of": 9.0}]}, 3),
    ],
)
def test_means_are_as_configured(distribution: dict[str, object], mean: float) -> None:
    assert mean_of(Distribution.model_validate(distribution)) == pytest.approx(mean, rel=0.01)


def test_a_mixture_has_two_modes_and_nothing_in_between() -> None:
    draw = draw_of(
        Distribution.model_validate(
            {
                "mixture": [
                    {"share": 0.979, "of": {"uniform": [13, 51]}},
                    {"share": 0.021, "of": {"uniform": [378, 488]}},
                ]
            }
        )
    )
    drawn = [draw((n + 0.5) / 10_000) for n in range(10_000)]
    assert sum(value > 300 for value in drawn) == 210
    assert not any(51 < value < 378 for value in drawn)


def test_min_and_max_clip() -> None:
    draw = draw_of(Distribution.model_validate({"normal": {"mean": 0, "sd": 10}, "min": -1, "max": 2}))
    assert draw(0.0) == -1 and draw(1.0) == 2


@pytest.mark.parametrize("wrong", [{}, {"exponential": 1, "geometric": 2}, {"quantiles": [[0.5, 1], [0, 2]]}])
def test_a_distribution_has_exactly_one_valid_kind(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Distribution.model_validate(wrong)
