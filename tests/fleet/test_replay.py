"""What a replay trains, when it refuses, and that a real run with a kill and a lost engine comes out the same."""

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.replay import train
from rollart.config import AlgorithmConfig, RunFile, TinyModelConfig, TrainingConfig, loading
from rollart.core.errors import RollartError
from rollart.core.event_log import EventLog
from rollart.core.events import AnyEvent, BatchTaken, Published, RolledBack, RunStarted, ServiceStarted, StepDone
from rollart.core.types import Outcome, Trajectory, Turn
from rollart.fleet import controller
from rollart.fleet import replay as replaying
from rollart.models import tiny
from rollart.rollout.groups import Group
from rollart.rollout.ledger import GroupRecord, SqliteLedger
from rollart.rollout.samples import sample_group, trained_members

RUN = """
name: small
model: {tiny: {}}
tasks: [{name: a, env: "rollart.envs.guess_number:GuessNumber"}]
training: {steps: 4}
"""


TINY: dict[str, Any] = {"hidden": 32, "layers": 1, "context": 256}
TASK = {
    "env": "rollart.envs.guess_number:GuessNumber",
    "max_turns": 2,
    "max_context": 160,
    "sampling": {"max_tokens": 4},
}


def trajectory(group: str, member: int, token: int = 7) -> Trajectory:
    turn = Turn((), (1, 2), "x", (token, 8), (-0.5, -0.25), (0, 0), "stop")
    return Trajectory(f"{group}.{member}", "a", group, member, 5, Outcome.FINISHED, (turn,), reward=float(member))


def taken(step: int, *groups: str, order: tuple[int, ...] = (1, 0)) -> BatchTaken:
    members = []
    for group in groups:
        full = Group(group, "a", 0, 5, 2, 0, done=[trajectory(group, member) for member in order])
        members.append(trained_members(full, sample_group(full)))
    return BatchTaken(
        step=step, ids=list(groups), groups={}, trajectories=2, tokens=8, waited_s=0, staleness={}, members=members
    )


def started(version: int) -> RunStarted:
    return RunStarted(name="small", preset="rollart", alpha=1, seed=0, steps=4, tasks=["a"], version=version)


def stepped(step: int, *groups: str, order: tuple[int, ...] = (1, 0)) -> Iterator[AnyEvent]:
    yield taken(step, *groups, order=order)
    yield StepDone(version=step + 1, seconds=0, tokens=8, values={}, tasks={})
    yield Published(version=step + 1, seconds=0, digests=f"{step:04d}{len(groups):04d}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "start").mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / "start" / name).touch()
    with closing(SqliteLedger.open(tmp_path / "ledger.sqlite")) as ledger:
        for index in range(4):
            ledger.start(GroupRecord(f"g{index}", "a", index, 5, 2, 0))
            for member in (0, 1):
                ledger.add(trajectory(f"g{index}", member))
    return tmp_path


def log(folder: Path, *events: AnyEvent) -> None:
    details = {
        "ranks": "1",
        "model": str(folder / "start"),
        "seed": "0",
        "engine_dtype": "float32",
        "config": TrainingConfig().model_dump_json(),
    }
    with closing(EventLog(folder / "events", lambda: 0.0)) as written:
        for event in (
            started(0),
            ServiceStarted(role="train", name="trainer", pid=1, seconds=0, details=details),
            *events,
        ):
            written.emit(event)


@pytest.mark.parametrize("back", [started(1), RolledBack(version=1, reason="lost")])
def test_only_what_the_checkpoints_kept_is_replayed(folder: Path, back: AnyEvent) -> None:
    log(folder, *stepped(0, "g0"), *stepped(1, "g1", "g2"), back, *stepped(1, "g2"), taken(2, "g3"))
    steps = replaying.history(folder)
    assert [step.taken.ids for step in steps] == [["g0"], ["g2"]]
    assert [step.digests for step in steps] == ["00000001", "00010001"]


def test_a_batch_has_its_members_in_the_order_of_training(folder: Path) -> None:
    log(folder, *stepped(0, "g1", "g0"))
    with closing(SqliteLedger.open_readonly(folder / "ledger.sqlite")) as ledger:
        batch = replaying.batch_of(replaying.history(folder)[0], ledger)
    assert [sample.id for group in batch.groups for sample in group.samples] == ["g1.1", "g1.0", "g0.1", "g0.0"]


def test_a_trajectory_that_was_changed_is_named(folder: Path) -> None:
    log(folder, *stepped(0, "g0"))
    with closing(SqliteLedger.open(folder / "ledger.sqlite")) as ledger:
        ledger.add(trajectory("g0", 1, token=9))
        with pytest.raises(RollartError, match=r"trajectory g0\.1 in the ledger is not the one that step 0 trained"):
            replaying.batch_of(replaying.history(folder)[0], ledger)


def forget(folder: Path, group: str) -> None:
    with closing(SqliteLedger.open(folder / "ledger.sqlite", keep=0)) as ledger:
        ledger.lease(0, [group])
        ledger.commit(1)
        ledger.forget(1)


def refusal(folder: Path, **options: int) -> str:
    with pytest.raises(RollartError) as refused:
        asyncio.run(replaying.replay(folder, **options))
    return str(refused.value)


def test_what_the_ledger_has_forgotten_is_refused_with_the_key_that_keeps_it(folder: Path) -> None:
    log(folder, *stepped(0, "g0"), *stepped(1, "g1"))
    forget(folder, "g0")
    assert "trajectories of steps 1 to 1 only" in refusal(folder)
    assert "the trajectories of step 0 are no longer in the ledger" in (text := refusal(folder, first=0))
    assert "ledger: {keep: all}" in text


def test_versions_that_were_never_trained_are_refused(folder: Path) -> None:
    log(folder, *stepped(0, "g0"))
    assert "has trained 1 steps, so there is no version 3" in refusal(folder, last=3)


def test_a_log_without_what_a_replay_needs_is_refused(folder: Path) -> None:
    log(folder, *(replace(event, members=[]) if isinstance(event, BatchTaken) else event for event in stepped(0, "g0")))
    assert "older version of rollart" in refusal(folder)


def test_another_machine_is_refused_by_what_differs() -> None:
    then = {"torch": "2.0", "threads": "2", "config": "{}"}
    replaying.check_same(then, {"torch": "2.0", "threads": "2"})
    with pytest.raises(RollartError, match=r"trained with threads 2 \(here 4\), MKL_CBWR unset \(here AVX2\), so"):
        replaying.check_same(then, {"torch": "2.0", "threads": "4", "MKL_CBWR": "AVX2"})


@pytest.mark.parametrize("logged", [{}, {"tasks": json.dumps({"a": {"kl": 0.5}})}, {"tasks": "{}"}])
def test_a_step_is_trained_with_the_algorithms_that_tasks_had_then(folder: Path, logged: dict[str, str]) -> None:
    now = loading.load(folder / "run.yaml", ["tasks.a.algorithm={kl: 0.1}"])
    details = {"seed": "0", "engine_dtype": "float32", "config": TrainingConfig().model_dump_json(), **logged}
    (task,) = replaying._with_settings(now, details).tasks
    then = {"kl": 0.1} if not logged else json.loads(logged["tasks"]).get("a")
    assert task.algorithm == (AlgorithmConfig(**then) if then else None)


def test_a_difference_names_the_first_tensor() -> None:
    same = {"a": "00000001", "b": "00000002", "c": "00000003"}
    assert replaying.compare(3, same, "000000010000000200000003") is None
    found = replaying.compare(3, same, "00000001ffffffff00000000")
    assert found is not None and (found.step, found.tensor, found.tensors) == (2, "b", 2)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(4, tmp_path_factory.mktemp("replay"))


@pytest.mark.slow
def test_a_run_with_a_kill_and_a_lost_engine_replays_bit_for_bit(real: Path) -> None:
    seen: list[tuple[int, bool | None]] = []
    result = asyncio.run(replaying.replay(real, on_version=lambda version, same: seen.append((version, same))))
    assert result.identical and seen == [(1, True), (2, True), (3, True), (4, True)]


@pytest.mark.slow
def test_tasks_with_a_teacher_a_critic_and_a_reference_replay_bit_for_bit(tmp_path: Path) -> None:
    teacher = tiny.make(TinyModelConfig(**TINY), tmp_path / "teacher", seed=5)
    own: dict[str, dict[str, Any]] = {
        "reference": {"kl": 0.1},
        "critic": {"advantage": "gae"},
        "teacher": {"advantage": "opd", "loss": "reverse_kl", "teacher_top": 3},
    }
    run = RunFile.model_validate(
        {
            "name": "several",
            "model": {"tiny": TINY},
            "tasks": [{**TASK, "name": name, "algorithm": algorithm} for name, algorithm in own.items()],
            "pools": {"wise": {"role": "teacher", "model": str(teacher)}},
            "environments": {"processes": 4},
            "training": {"steps": 3, "batch_groups": 3, "group_size": 2},
            "evaluation": {"every": 0, "final_episodes": 1},
        }
    )
    asyncio.run(controller.train(run, tmp_path / "run"))
    result = asyncio.run(replaying.replay(tmp_path / "run"))
    assert (result.start, result.end, result.compared, result.difference) == (0, 3, 3, None)


@pytest.mark.slow
def test_a_step_with_another_learning_rate_gives_a_difference(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(step: replaying.TrainedStep) -> replaying.TrainedStep:
        config = TrainingConfig.model_validate_json(step.details["config"])
        faster = config.model_copy(update={"lr": 2 * config.lr}).model_dump_json()
        return dataclasses.replace(step, details={**step.details, "config": faster})

    steps = replaying.history(real)
    monkeypatch.setattr(replaying, "history", lambda folder: list(map(other, steps)))
    result = asyncio.run(replaying.replay(real))
    assert not result.identical and result.difference is not None
    assert result.compared == result.difference.version  # the first whose batch had anything to learn
