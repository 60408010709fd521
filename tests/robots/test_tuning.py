"""RL of an imitated policy: groups on their own clocks, the staleness bound, runs and their resume."""

import asyncio
import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tuned_obstacle import Exploring, Kept, LocalPool, exported, run_file, tuner
from typer.testing import CliRunner

from rollart.app.cli import app
from rollart.config import loading
from rollart.core.errors import EngineFailed, RollartError
from rollart.core.event_log import EventLog, read_events
from rollart.core.events import (
    BatchTaken,
    Checkpointed,
    Evaluated,
    GroupDropped,
    GroupStarted,
    RunStarted,
    StepDone,
    TrajectoryEnded,
)
from rollart.observe.snapshot import words_of
from rollart.robots import imitation
from rollart.robots.exploration import ActingPolicy
from rollart.robots.learner import TrainedPolicy
from rollart.robots.tuning import gain_of, tune
from rollart.robots.tuning_learner import ChunkBatch
from rollart.rollout.ledger import SqliteLedger


def test_a_group_that_is_too_old_is_dropped_and_counted_and_the_others_do_not_wait_for_it(tmp_path: Path) -> None:
    run = run_file(steps=4, alpha=1)
    learner = tuner(tmp_path, run)

    async def play() -> tuple[Kept, str]:
        never = asyncio.Event()  # the first group hangs in its first chunk

        def gate(seed: int) -> asyncio.Event | None:
            return never if seed == exploring.sink.of(GroupStarted)[0].seed else None

        exploring = Exploring(learner, tmp_path, run, LocalPool(gate))
        for _ in range(3):
            assert len((await exploring.take()).chosen)
            exploring.advance(learner, tmp_path)
        await exploring.scheduler.stop()
        return exploring.sink, exploring.sink.of(GroupStarted)[0].group

    sink, first = asyncio.run(play())
    assert [len(event.ids) for event in sink.of(BatchTaken)] == [2, 2, 2]
    assert all(first not in event.ids for event in sink.of(BatchTaken))
    assert [(event.group, event.reason) for event in sink.of(GroupDropped)] == [(first, "stale")]
    assert all(age <= 1 for event in sink.of(BatchTaken) for age in event.staleness)


def test_no_more_groups_are_started_than_the_bound_allows(tmp_path: Path) -> None:
    run = run_file(steps=3, alpha=0)
    learner = tuner(tmp_path, run)

    async def play() -> list[int]:
        exploring, started = Exploring(learner, tmp_path, run, LocalPool()), []
        for _ in range(3):
            await exploring.take()
            started.append(len(exploring.sink.of(GroupStarted)))  # nothing runs while the policy is trained
            exploring.advance(learner, tmp_path)
        await exploring.scheduler.stop()
        return [*started, len(exploring.sink.of(GroupStarted))]

    assert asyncio.run(play()) == [2, 4, 6, 6]


def test_a_policy_that_is_too_old_waits_for_the_next(tmp_path: Path) -> None:
    run = run_file()
    learner = tuner(tmp_path, run)

    async def play() -> list[int]:
        exploring = Exploring(learner, tmp_path, run, LocalPool())
        acting, steps = exploring.acting, []
        for version in (0, 1):
            acting.require(version)
            noise = torch.zeros(acting.policy.noise_size)
            proposing = asyncio.create_task(acting.propose(torch.zeros(1, 2), noise))
            await asyncio.wait([proposing], timeout=0 if version else 30)
            assert proposing.done() is (version == 0)
            if version:
                exploring.advance(learner, tmp_path)
            steps.append((await proposing)[1])
        return steps

    assert asyncio.run(play()) == [0, 3]


def test_a_version_that_never_comes_is_an_error_with_its_number(tmp_path: Path) -> None:
    learner = tuner(tmp_path, run_file())
    exported(learner, tmp_path)

    async def propose() -> None:
        acting = ActingPolicy(tmp_path / "policy", 3, deadline=0.0)
        acting.require(2)
        await acting.propose(torch.zeros(1, 2), torch.zeros(acting.policy.noise_size))

    with pytest.raises(EngineFailed, match=r"version 2 of the policy was not there after 0 s; lower tuning"):
        asyncio.run(propose())


def test_an_environment_that_fails_is_no_failure_of_the_policy(tmp_path: Path) -> None:
    run = run_file(group_size=4)
    learner = tuner(tmp_path, run)

    async def play(broken) -> tuple[ChunkBatch, Kept]:
        exploring = Exploring(learner, tmp_path, run, LocalPool(broken=broken))
        try:
            return await exploring.take(), exploring.sink
        finally:
            await exploring.scheduler.stop()

    batch, sink = asyncio.run(play(lambda claim: claim % 4 == 1))
    assert len(batch.sequences.unique()) == 8  # others are played in place of those that failed
    assert {event.outcome for event in sink.of(TrajectoryEnded) if event.reward is None} >= {"env_failed"}
    with pytest.raises(RollartError, match=r"nothing is left to train on; .*the simulator crashed"):
        asyncio.run(play(lambda claim: True))


def test_the_gain_is_paired_over_the_episodes_that_were_played_both_times() -> None:
    gain = gain_of({1: False, 2: False, 3: True, 4: True}, {1: True, 2: False, 3: True, 5: False})
    assert (gain.before, gain.after) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert gain.mean == pytest.approx(1 / 3) and gain.half == pytest.approx(1.96 / 3)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["tuning.loss=dpo"], "dpo needs a teacher, a reference or pairs, and there are none; use ppo"),
        (["tuning.loss=pppo"], "did you mean 'ppo'?"),
        (["tuning.advantage=gae"], "gae needs turns or tokens; use grpo or rloo"),
        (["tuning.group_size=1"], "tuning.group_size"),
        ([], "holds no run of 'obstacle' to tune; run `rollart robots train` first"),
    ],
)
def test_what_cannot_be_tuned_is_one_sentence(tmp_path: Path, changes: list[str], problem: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: obstacle\ntask: toy:obstacle\n")
    sets = [part for change in changes for part in ("--set", change)]
    result = CliRunner().invoke(app, ["robots", "tune", str(path), "--output", str(tmp_path / "runs"), *sets])
    assert not (tmp_path / "runs").exists()
    assert result.exit_code == 2 and problem in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_what_the_episodes_so_far_depend_on_stays_when_a_tuning_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(loading.dump(run_file()))
    with pytest.raises(RollartError, match=r"was started with tuning\.candidates 4; resume it with the same"):
        asyncio.run(tune(run_file(candidates=2), tmp_path, start=None, on_log=lambda log: None))


@pytest.mark.slow
def test_a_tuning_leaves_its_log_policy_and_gain_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    run, trained, folder = run_file(evaluate_every=2), tmp_path / "trained", tmp_path / "tuned"
    asyncio.run(imitation.train(run, trained, resume=False, on_log=lambda log: None))

    def stop_at_a_checkpoint(log: EventLog) -> None:
        tuning = asyncio.current_task()
        log.subscribe(lambda event: isinstance(event, Checkpointed) and not tuning.cancelling() and tuning.cancel())

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(tune(run, folder, start=trained, on_log=stop_at_a_checkpoint))
    started = next(iter(read_events(folder / "events", RunStarted)))
    assert words_of(started.work).command == "robots tune"
    gain = asyncio.run(tune(run, folder, start=None, on_log=lambda log: None))
    first, second = (event.version for event in read_events(folder / "events", RunStarted))
    assert first == 0 and second in (2, 3)  # an update that is under way when the run is stopped is saved
    assert [event.version for event in read_events(folder / "events", StepDone)] == [1, 2, 3]
    groups = [event.group for event in read_events(folder / "events", GroupStarted)]
    assert len(set(groups)) == len(groups)
    with closing(SqliteLedger.open_readonly(folder / "ledger.sqlite")) as ledger:
        assert ledger.group_states()["consumed"] == 3 * 2
    assert [event.version for event in read_events(folder / "events", Evaluated)] in ([0, 3], [0, 2, 3])
    assert json.loads((folder / "score.json").read_text())["success"] == gain.after
    policy = TrainedPolicy(folder / "policy")
    assert (policy.count, policy.step) == (4, 9)
