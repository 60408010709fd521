"""`rollart sample`: a file of trajectories with rewards, the same however often it was stopped."""

import json
from pathlib import Path

import pytest
from test_endpoint_eval import served

import rollart
from rollart.config.loading import load
from rollart.core.errors import RollartError
from rollart.core.events import TrajectoryEnded
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
