"""The auditor finds every violation that is planted in the traces of a run, and none in a good one."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.audit import CHECKS, audit
from rollart.config import RunFile, loading
from rollart.core.event_log import EventLog
from rollart.core.events import (
    AnyEvent,
    BatchTaken,
    GroupDropped,
    GroupStarted,
    Quarantined,
    Released,
    RunEnded,
    RunStarted,
    TrajectoryEnded,
    TrajectoryStarted,
)
from rollart.core.types import Outcome, Trajectory, Turn
from rollart.rollout.ledger import GroupRecord, SqliteLedger
from rollart.training.block_files import write_blocks
from rollart.training.shards import Block

RUN = RunFile.model_validate(
    {
        "model": {"tiny": {"hidden": 32, "layers": 1}},
        "tasks": [{"name": name, "env": "rollart.envs.addition:Addition"} for name in ("a", "b")],
        "training": {"steps": 3, "batch_groups": 2, "group_size": 2},
    }
)


def batch(step: int, ids: list[str], age: int = 0) -> BatchTaken:
    groups = {task: sum(id.startswith(task) for id in ids) for task in ("a", "b")}
    return BatchTaken(step=step, ids=ids, groups=groups, trajectories=4, tokens=9, waited_s=0, staleness={age: 4})


class Traces:
    """Those of a good run of three steps, killed after the second one began, to plant violations in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        started = RunStarted(name="r", preset="rollart", alpha=1, seed=0, steps=3, tasks=["a", "b"])
        self.events: list[AnyEvent] = [
            started,
            *(GroupStarted(group=f"{task}-{n}", task=task, seed=n, members=2, version=0)
              for task in "ab" for n in (0, 1, 2)),
            TrajectoryStarted(trajectory="a-0.0", task="a", group="a-0", version=0),
            batch(0, ["a-0", "b-0"]),
            batch(1, ["a-1", "b-1"]),  # trained again after the kill, with another group
            GroupStarted(group="b-3", task="b", seed=3, members=2, version=0),
            RunStarted(name="r", preset="rollart", alpha=1, seed=0, steps=3, tasks=["a", "b"], version=1, resumed=True),
            batch(1, ["a-1", "b-2"], age=1),
            GroupDropped(group="b-1", task="b", reason="stale", trajectories=2),
            batch(2, ["a-2", "b-3"]),
            RunEnded(version=3, reason="finished"),
        ]  # fmt: skip
        ledger = SqliteLedger.open(folder / "ledger.sqlite")
        for step, groups in enumerate((("a-0", "b-0"), ("a-1", "b-2"), ("a-2", "b-3"))):
            for group in groups:
                self.add(ledger, group)
            ledger.lease(step, groups)
        self.add(ledger, "b-1")
        ledger.drop("b-1", "stale")
        ledger.commit(3)
        ledger.close()
        (folder / "run.yaml").write_text(loading.dump(RUN))
        (folder / "model").mkdir()
        save_file({"w": torch.ones(2)}, folder / "model" / "model.safetensors")
        (folder / "checkpoints" / "000003").mkdir(parents=True)
        write_blocks(folder / "checkpoints" / "000003" / "rank.safetensors", {"w": Block((4,), (0,), torch.ones(4))})

    def add(self, ledger: SqliteLedger, group: str, version: int = 2) -> None:
        task, index = group.split("-")
        ledger.start(GroupRecord(group, task, int(index), seed=int(index), size=2, version=version))
        for member in (0, 1):
            turn = Turn((), prompt=(1,), action="2", tokens=(2,), logprobs=(-1.0,), versions=(version,), finish="stop")
            ledger.add(
                Trajectory(
                    id=f"{group}.{member}",
                    task=task,
                    group=group,
                    member=member,
                    seed=0,
                    outcome=Outcome.FINISHED,
                    turns=(turn,),
                    reward=0.0,
                )
            )

    def sql(self, text: str) -> None:
        database = sqlite3.connect(self.folder / "ledger.sqlite")
        with database:
            database.execute(text)
        database.close()

    def audit(self) -> dict[str, list[str]]:
        log = EventLog(self.folder / "events", lambda: 0.0)
        for event in self.events:
            log.emit(event)
        log.close()
        found: dict[str, list[str]] = {}
        for violation in audit(self.folder, {"a-0.0"}):
            found.setdefault(violation.invariant, []).append(violation.what)
        return found


def trained_twice(traces: Traces) -> None:
    traces.events[-2] = batch(2, ["a-2", "b-0"])


def a_group_is_gone(traces: Traces) -> None:
    traces.sql("delete from groups where id = 'a-0'")


def still_leased(traces: Traces) -> None:
    traces.sql("update groups set state = 'leased' where id = 'b-3'")


def consumed_by_another_step(traces: Traces) -> None:
    traces.sql("update groups set step = 1 where id = 'a-2'")


def a_step_is_missing(traces: Traces) -> None:
    del traces.events[-4]


def too_old(traces: Traces) -> None:
    traces.events[-2] = batch(2, ["a-2", "b-3"], age=2)


def too_many_of_one_task(traces: Traces) -> None:
    traces.events[-2] = batch(2, ["a-2", "a-9"])


def a_drop_is_not_in_the_log(traces: Traces) -> None:
    del traces.events[-3]


def no_outcome(traces: Traces) -> None:
    traces.events.insert(-1, TrajectoryStarted(trajectory="b-3.0", task="b", group="b-3", version=2))


def a_member_is_missing(traces: Traces) -> None:
    traces.sql("update trajectories set id = 'x', grp = 'x' where id = 'a-2.1'")


def damaged_checkpoint(traces: Traces) -> None:
    (path,) = (traces.folder / "checkpoints" / "000003").iterdir()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def not_finite(traces: Traces) -> None:
    save_file({"w": torch.tensor([1.0, float("nan")])}, traces.folder / "model" / "model.safetensors")


PLANTED: list[tuple[Callable[[Traces], None], str]] = [
    (trained_twice, "nothing trained twice"),
    (a_group_is_gone, "nothing lost"),
    (still_leased, "nothing lost"),
    (consumed_by_another_step, "ledger and log agree"),
    (a_step_is_missing, "every step once"),
    (too_old, "bound kept"),
    (too_many_of_one_task, "mixture exact"),
    (a_drop_is_not_in_the_log, "every drop counted"),
    (no_outcome, "every trajectory ends"),
    (a_member_is_missing, "only good members trained"),
    (damaged_checkpoint, "checkpoint whole"),
    (not_finite, "weights finite"),
]


def test_a_good_run_with_a_kill_in_it_has_no_violations(tmp_path: Path) -> None:
    assert Traces(tmp_path).audit() == {}


@pytest.mark.parametrize(("plant", "invariant"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_violation_is_found(tmp_path: Path, plant: Callable[[Traces], None], invariant: str) -> None:
    traces = Traces(tmp_path)
    plant(traces)
    assert invariant in traces.audit()


def test_every_check_has_a_planted_violation() -> None:
    assert {invariant for _, invariant in PLANTED} == set(CHECKS)


def test_a_task_that_is_out_has_no_share_until_it_is_back(tmp_path: Path) -> None:
    traces = Traces(tmp_path)
    out = Quarantined(task="b", reason="it fails", wait_s=1.0)
    traces.events[-2:-1] = [out, out, Released(task="b", seconds=1.0), batch(2, ["a-2", "b-3"])]
    assert traces.audit() == {}
    (tmp_path / "other").mkdir()
    traces = Traces(tmp_path / "other")
    traces.events.insert(-2, out)
    assert "mixture exact" in traces.audit()


def test_a_trajectory_that_ends_twice_is_no_violation_of_a_resumed_run(tmp_path: Path) -> None:
    traces = Traces(tmp_path)
    ended = TrajectoryEnded(
        trajectory="a-0.0", task="a", group="a-0", outcome=Outcome.FINISHED, turns=1, tokens=2, seconds=1.0
    )
    traces.events.insert(-1, ended)
    assert traces.audit() == {}
