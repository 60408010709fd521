import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollart.app.cli import app
from rollart.core.errors import ConfigError
from rollart.simulator.paper import FOLDER
from rollart.simulator.scenario import load
from rollart.simulator.sweep import points

MATH = FOLDER / "same_cost_math.yaml"


def test_keys_of_one_sweep_change_together_and_sweeps_combine() -> None:
    found = points(["pools.a.count,pools.b.count=4:0,2:3", "rollout.alpha=1,2"])
    assert [point.overrides for point in found] == [
        ["pools.a.count=4", "pools.b.count=0", "rollout.alpha=1"],
        ["pools.a.count=4", "pools.b.count=0", "rollout.alpha=2"],
        ["pools.a.count=2", "pools.b.count=3", "rollout.alpha=1"],
        ["pools.a.count=2", "pools.b.count=3", "rollout.alpha=2"],
    ]


def test_values_in_brackets_are_not_split() -> None:
    found = points(["delay,n={normal: {mean: 5, sd: 2}}:1,[1, 2]:2"])
    assert [list(point.values.values()) for point in found] == [["{normal: {mean: 5, sd: 2}}", "1"], ["[1, 2]", "2"]]


def test_a_preset_is_not_an_override() -> None:
    sync, rollart = points(["preset=sync,rollart"])
    assert (sync.preset, rollart.preset, sync.overrides) == ("sync", "rollart", [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (["rollout.alpha"], "write it as KEY=A,B,C"),
        (["a,b=1:2,3"], "'3' should have a value for each of a, b"),
        (["a=1", "a=2"], "a key may be swept only once"),
    ],
)
def test_the_error_for_an_invalid_sweep_shows_the_syntax(text: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        points(text)


def test_a_pool_of_count_zero_is_removed() -> None:
    mix = FOLDER.parent / "simulate" / "mix.yaml"
    assert set(load(mix, ["pools.h800.count=0"]).pools) == {"trainer", "h20"}


def test_a_sweep_prints_a_row_for_every_value(tmp_path: Path) -> None:
    small = ["--set", "training.steps=2", "--set", "training.group_size=2"]
    swept = ["--sweep", "pools.rollout.device,pools.rollout.count=H800:2,H20:6"]
    result = CliRunner().invoke(app, ["simulate", str(MATH), *small, *swept, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.strip().splitlines()[-1])["sweep"]
    assert [row["values"]["pools.rollout.device"] for row in rows] == ["H800", "H20"]
    assert rows[0]["step_s"] != rows[1]["step_s"]
