"""What an earlier run measured of its tasks."""

from pathlib import Path
from typing import Any

import pytest

from rollart.config import RunFile
from rollart.core.errors import RollartError
from rollart.core.event_log import EventLog
from rollart.core.events import TurnDone
from rollart.launch.launcher import Node
from rollart.placement.inventory import Inventory
from rollart.placement.plan import plan
from rollart.placement.workload import measured_shapes, setup_of


def turn(trajectory: str, turn: int, prompt: int, tokens: int) -> TurnDone:
    common = {"engine": "e", "cached": 0, "version": 0, "queue_s": 0.0, "generate_s": 0.1, "env_s": 0.1}
    return TurnDone(trajectory=trajectory, task="walk", turn=turn, prompt=prompt, tokens=tokens, **common)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    log = EventLog(tmp_path / "events", lambda: 0.0)
    # Two interleaved conversations: 100 tokens, 10 of answer, 50 more, 30 of answer; and 40 with 20.
    for event in (turn("a", 0, 100, 10), turn("b", 0, 40, 20), turn("a", 1, 160, 30)):
        log.emit(event)
    log.close()
    return tmp_path


def test_a_turn_counts_with_what_it_adds_and_the_context_before_it(run_dir: Path) -> None:
    shape = measured_shapes(run_dir)["walk"]
    assert (shape.prompt, shape.decode, shape.context) == pytest.approx((190 / 3, 20, 110 / 3))
    assert shape.source == "measured"


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RollartError, match="is not a run folder"):
        measured_shapes(tmp_path / "nothing")


def test_the_plan_of_a_run_that_names_it_has_the_measured_shape(run_dir: Path) -> None:
    task: dict[str, Any] = {"name": "walk", "env": "json:loads"}
    inventory = Inventory((Node("here", "", {"cpu": 2.0}, {"cpu": 2.0}),), "here", overcommit=True)
    sources = [
        plan(RunFile.model_validate({"model": {"tiny": {}}, "tasks": [task], **more}), inventory).tasks[0].shape.source
        for more in ({}, {"measured": str(run_dir)})
    ]
    assert sources == ["estimated", "measured"]


@pytest.mark.parametrize(
    ("training", "rollout", "tokens"),
    [
        ({"batch_groups": 4, "group_size": 8}, {}, 4 * 8 * 128),
        ({"batch_groups": 4, "group_size": 8, "updates": 2}, {}, 2 * 8 * 128),
        ({"batch_groups": 4, "group_size": 8}, {"elastic": 1.5}, 6 * 8 * 128),
        ({"batch_groups": 64, "group_size": 8}, {}, 8192),
        ({"batch_groups": 4, "group_size": 8, "pack_tokens": 1000}, {}, 1000),
    ],
)
def test_a_pass_has_no_more_tokens_than_an_update(
    training: dict[str, int], rollout: dict[str, float], tokens: int
) -> None:
    task = {"name": "a", "env": "a:B", "max_context": 128}
    given: dict[str, Any] = {"model": {"tiny": {}}, "tasks": [task], "training": training, "rollout": rollout}
    assert setup_of(RunFile.model_validate(given)).tokens == tokens
    agents = given | {"tasks": [{"name": "a", "agent": "a:b", "max_context": 128}]}
    assert setup_of(RunFile.model_validate(agents)).tokens == training.get("pack_tokens", 8192), "several sequences"
