import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from rollart.config import error_messages, loading
from rollart.config.robots import RobotRunFile
from rollart.config.yaml_tree import dotted
from rollart.core.errors import ConfigError
from rollart.simulator.scenario import Scenario, load

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
    with pytest.raises(ConfigError) as raised:
        load(SCENARIO, [f"simulate.workloads.swe.{override}"])
    (sentence,) = str(raised.value).splitlines()
    assert said in sentence
    assert "function-after" not in sentence


def test_an_unknown_name_of_a_section_is_corrected() -> None:
    run = Path(__file__).parents[2] / "examples" / "robots" / "pick_place.yaml"
    with pytest.raises(ConfigError) as raised:
        loading.validated(loading.read(run, ["policy=meanflo"]), RobotRunFile)
    (sentence,) = str(raised.value).splitlines()
    assert 'policy must be one of meanflow, consistency, flow, ddim, regression, not "meanflo"' in sentence
    assert "did you mean 'meanflow'?" in sentence


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("environments.slots", "environments.processes"),
        ("tasks.lake.agent.calls", "tasks.lake.agent.max_calls"),
        ("simulate.workloads.swe.reset.mixture.0.of.least", "simulate.workloads.swe.reset.mixture.0.of.min"),
        ("environments.warm", None),
        ("tasks.lake.calls", None),
    ],
)
def test_a_renamed_key_is_known_by_its_old_name(old: str, new: str | None) -> None:
    assert error_messages.renamed(old) == new


def test_an_old_key_in_a_run_file_or_an_override_is_an_error_that_names_the_new_one(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    text = "model: {tiny: {}}\ntasks: [{name: lake, env: json:dumps}]\n"
    run.write_text(text + "environments:\n  quarantine:\n    least: 3\n")
    renamed = "environments.quarantine.least was renamed; write environments.quarantine.min_count"
    with pytest.raises(ConfigError) as raised:
        loading.load(run)
    assert str(raised.value) == f"{run}:5: {renamed}"
    run.write_text(text)
    with pytest.raises(ConfigError) as raised:
        loading.load(run, ["environments.quarantine.least=3"])
    assert str(raised.value) == f"--set environments.quarantine.least=3: {renamed}"


def test_an_old_key_of_a_scenario_is_an_error_that_names_the_new_one() -> None:
    with pytest.raises(ConfigError) as raised:
        load(SCENARIO, ["simulate.workloads.swe.turns={exponential: 3, least: 1}"])
    assert str(raised.value).endswith(
        "simulate.workloads.swe.turns.least was renamed; write simulate.workloads.swe.turns.min"
    )


@pytest.mark.parametrize(("old", "new"), error_messages.RENAMED.items())
def test_a_new_name_is_a_key_and_an_old_one_is_not(old: str, new: str) -> None:
    sections = error_messages._sections(Scenario, ())
    keys = [re.sub("<[a-z]+>", "*", dotted((*path, key))) for path, section in sections for key in section.model_fields]
    assert any(fnmatch(key, new) for key in keys)
    assert not any(fnmatch(key, old) for key in keys)
