"""Observations that leave no room for an action, by the real renderer and on modelled services."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from world import build

from rollart.core.events import TrajectoryEnded
from rollart.core.schedule import preset
from rollart.core.types import Message, Outcome, Sampling, Step, Trajectory
from rollart.models import tiny
from rollart.models.chat import ChatRenderer
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.trajectory import Attempt, RolloutTask
from rollart.simulator.clock import run

GIANT = "a" * 3_000_000


@dataclass
class Talkative:
    """Says these texts, one after the other."""

    texts: list[str]

    async def reset(self, seed: int) -> tuple[Message, ...]:
        return (Message("user", self.texts[0]),)

    async def step(self, action: str) -> Step:
        self.texts = self.texts[1:]
        return Step((Message("user", self.texts[0]),), None, False)

    @asynccontextmanager
    async def claim(self, task: str, held_out: bool) -> AsyncIterator["Talkative"]:
        yield self


def play(folder: Path, *texts: str) -> tuple[Trajectory, TrajectoryEnded]:
    tiny.tokenizer(512).save_pretrained(folder)

    async def main() -> tuple[Trajectory, TrajectoryEnded]:
        made = build(preset("rollart", 1, 2.0, 0, 0), SqliteLedger.open(folder / "ledger.sqlite"))
        runner = replace(
            made.scheduler._attempts._runner, environments=Talkative(list(texts)), renderer=ChatRenderer(folder)
        )
        task = RolloutTask("a", 1.0, 3, 400, Sampling(max_tokens=8))
        trajectory = await runner.run(Attempt("a.0", task, "a", 0, 0, 0))
        return trajectory, made.recorder.of(TrajectoryEnded)[-1]

    return run(main())


@pytest.mark.parametrize("giant", [GIANT, "a" * 500])
def test_an_observation_that_leaves_no_room_truncates_the_trajectory_with_the_reason(
    tmp_path: Path, giant: str
) -> None:
    trajectory, reported = play(tmp_path, "begin", "go on", giant)
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.TRUNCATED, 2)
    assert trajectory.reward is not None
    assert f"an observation of {len(giant):,} characters leaves no room for an action of 8 tokens" in reported.reason


def test_a_first_observation_that_leaves_no_room_is_the_fault_of_its_environment(tmp_path: Path) -> None:
    trajectory, _ = play(tmp_path, GIANT)
    assert trajectory.outcome is Outcome.ENV_FAILED
    assert "task a: an observation of 3,000,000 characters leaves no room" in trajectory.reason
    assert "an action of 8 tokens in max_context 400; the chat template" in trajectory.reason


def test_other_ways_to_be_truncated_have_their_reasons_too(tmp_path: Path) -> None:
    trajectory, _ = play(tmp_path, "1", "2", "3", "4")
    assert (trajectory.outcome, trajectory.reason) == (Outcome.TRUNCATED, "truncated after max_turns 3")
