from pathlib import Path

import pytest

from rollart.core.errors import ConfigError
from rollart.simulate.scenario import load

SCENARIO = Path(__file__).parents[2] / "examples" / "paper" / "end_to_end.yaml"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("turns=abc", 'swe.turns must be a number or a section with keys of its own, not "abc"'),
        (
            "turns={lognormals: 3}",
            "unknown key 'lognormals' in simulate.workloads.swe.turns; did you mean 'lo",
        ),
        ("turns={lognormal: {mean: 3, sigm: 2}}", "swe.turns.lognormal; did you mean 'sigma'?"),
        ("turns={uniform: 3}", "swe.turns.uniform must be a list, not 3"),
        ("turns={uniform: [1, 2, 3]}", "swe.turns.uniform must have at most 2 items, not [1, 2, 3]"),
        (
            "reset={mixture: [{share: 2, of: {normal: 3}}]}",
            "mixture.0.of.normal must be a section with keys",
        ),
        ("reset={lognormal: {sigma: 1}}", "swe.reset.lognormal: give either `median` or `mean`"),
        ("turnz=4", "unknown key 'turnz' in simulate.workloads.swe; did you mean 'turns'?"),
    ],
)
def test_a_mistake_in_one_of_several_kinds_of_values_is_one_sentence_about_what_was_meant(
    override: str, said: str
) -> None:
    with pytest.raises(ConfigError) as told:
        load(SCENARIO, [f"simulate.workloads.swe.{override}"])
    (sentence,) = str(told.value).splitlines()
    assert said in sentence
    assert "function-after" not in sentence
