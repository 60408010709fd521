"""What a task may have of its own: the run's algorithm where it says nothing, and one sentence where it is wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.config import RunFile
from rollart.config.loading import dump, load
from rollart.core.errors import ConfigError
from rollart.core.schedule import GroupRule, WeightPlan

TASK = {"name": "a", "env": "rollart.envs.addition:Addition"}


def run_of(folder: Path, own: dict[str, Any], **keys: Any) -> RunFile:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({"model": {"tiny": {}}, "tasks": [{**TASK, **own}], **keys}))
    return load(file)


def test_a_task_s_algorithm_is_the_run_s_but_for_its_own_keys_and_resolves_to_itself(tmp_path: Path) -> None:
    training = {"algorithm": {"clip_high": 0.4, "loss": "cispo", "correction": "token"}}
    run = run_of(tmp_path, {"algorithm": {"loss": "gspo", "sapo_temperatures": [1.0, 1.1]}}, training=training)
    own = run.tasks[0].algorithm
    assert own is not None and (own.loss, own.clip_high, own.correction.use) == ("gspo", 0.4, ("token",))
    (tmp_path / "resolved.yaml").write_text(dump(run))
    assert load(tmp_path / "resolved.yaml") == run


def test_short_forms_of_rules(tmp_path: Path) -> None:
    task = run_of(tmp_path, {"filter": "spread", "schedule": [[0, 1.0], [9, 0.5]]}).tasks[0]
    assert task.filter is not None and task.filter.rule() == GroupRule(spread=True)
    assert task.schedule is not None and task.schedule.plan() == WeightPlan(((0, 1.0), (9, 0.5)), linear=True)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"filter": {"success": [0.9, 0.1]}}, "success must be a range of shares"),
        ({"schedule": [[5, 1.0], [2, 1.0]]}, "the steps of `points` must rise"),
        ({"schedule": [[0, 1.0], [3, 0.0]]}, "every task has weight 0 at step 3"),
        ({"algorithm": {"evidence_power": 0.5}}, "set it in training.algorithm, not for task 'a'"),
        ({"algorithm": {"los": "ppo"}}, "unknown key 'los' in tasks.a.algorithm; did you mean 'loss'?"),
        ({"group_size": 1}, "tasks.a.group_size"),
    ],
)
def test_a_rule_that_cannot_be_is_named(tmp_path: Path, own: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_of(tmp_path, own)
    assert message in str(caught.value)
