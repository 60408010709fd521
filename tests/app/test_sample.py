"""`rollart sample` and `rollart dpo`: a file of trajectories with rewards, and a model that learnt from it."""

import json
from pathlib import Path

import pytest
from test_endpoint_eval import served

import rollart
from rollart.config.loading import load
from rollart.core.errors import ConfigError, RollartError
from rollart.core.events import StepDone, TrajectoryEnded
from rollart.fleet.pairs import for_pairs
from rollart.models.folder import is_model
from rollart.warmup.conversations import read_conversations

RUN = """
name: sums
model: {tiny: {hidden: 32, layers: 1, heads: 2, kv_heads: 1, context: 128}}
tasks:
  - {name: sums, env: "rollart.envs.addition:Addition", max_context: 64, sampling: {max_tokens: 8}}
sample: {episodes: 3, samples: 2}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


@pytest.mark.slow
def test_an_endpoint_gives_a_file_that_the_warmup_reads(run_file: Path, tmp_path: Path) -> None:
    with served("12") as (url, requests):
        file = rollart.sample(run_file, model="big-model", endpoint=url, folder=tmp_path / "samples")
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    assert len(rows) == len(requests) == 6 and len({row["episode"] for row in rows}) == 3
    assert all(row["reward"] is not None and row["messages"][-1]["content"] == "12" for row in rows)
    assert len(list(read_conversations(file))) == 6


@pytest.mark.slow
def test_a_sampling_that_was_stopped_gives_the_same_file(run_file: Path, tmp_path: Path) -> None:
    whole = rollart.sample(run_file, folder=tmp_path / "whole").read_bytes()

    played: list[str] = []

    def note(event: object) -> None:
        played.extend([event.trajectory] if isinstance(event, TrajectoryEnded) else [])

    run = load(run_file, ["sample.episodes=1"])
    rollart.sample(run, folder=tmp_path / "part")
    file = rollart.sample(run_file, folder=tmp_path / "part", resume=True, on_event=note)
    assert file.read_bytes() == whole and len(played) == 4, "two of six were there"
    with pytest.raises(RollartError, match="has samples of the model of the run"):
        rollart.sample(run_file, model="other", endpoint="http://localhost/v1", folder=tmp_path / "part", resume=True)


@pytest.mark.slow
def test_pairs_are_trained_by_the_loop_of_rl_with_its_evaluations_and_resume(run_file: Path, tmp_path: Path) -> None:
    lines = [{"prompt": f"{number} + 1", "chosen": str(number + 1), "rejected": str(number)} for number in range(2, 8)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changed = [f"preference.pairs={pairs}", "training.batch_groups=4", "evaluation.final_episodes=2"]
    run = load(run_file, [*changed, "training.steps=2"])
    rollart.train(run, folder=tmp_path / "dpo", stage="dpo")
    more = load(run_file, [*changed, "training.steps=3"])
    folder = rollart.train(more, folder=tmp_path / "dpo", stage="dpo", resume=True)
    steps = list(folder.events(StepDone))
    assert [step.version for step in steps] == [1, 2, 3] and steps[-1].values["pair_margin"] > 0
    assert folder.summary()["tasks"]["sums"]["episodes"] == 2 and is_model(folder.model)


def test_a_loss_that_is_not_of_pairs_is_refused(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"'gspo', which is not a loss of pairs; use dpo or ipo"):
        for_pairs(load(run_file, ["training.algorithm.loss=gspo"]))
    assert for_pairs(load(run_file)).training.algorithm.loss == "dpo"
