"""Reads what a run left behind and states which of its invariants do not hold.

    python benchmarks/chaos.py --audit RUN_DIR

The event log, the ledger, the checkpoints and the model are compared with each other. The history that survives is the
one that leads to the last checkpoint: what was trained after a checkpoint that a restart went back to does not count. A
kill may leave the log up to a second ahead of the ledger, never the other way.
"""

import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from rollart.config import RunFile, loading
from rollart.core.event_log import read_events
from rollart.core.events import (
    AnyEvent,
    BatchTaken,
    GroupDropped,
    GroupStarted,
    Quarantined,
    Released,
    RolledBack,
    RunEnded,
    RunStarted,
    TrajectoryEnded,
    TrajectoryStarted,
)
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.mixture import Mixture
from rollart.training.block_files import damaged


class Violation(NamedTuple):
    invariant: str
    what: str


class GroupState(NamedTuple):
    task: str
    size: int
    state: str
    step: int | None
    reason: str
    forgotten: bool


@dataclass
class History:
    """What the log says, in one pass. `quotas` are the groups by task that each surviving batch should have."""

    run: RunFile
    alpha: int = 0
    started: set[str] = field(default_factory=set)
    dropped: dict[str, str] = field(default_factory=dict)
    batches: dict[int, BatchTaken] = field(default_factory=dict)
    quotas: dict[int, dict[str, int]] = field(default_factory=dict)
    unended: set[str] = field(default_factory=set)
    ends: Counter[str] = field(default_factory=Counter)
    end: str = ""
    _open: set[str] = field(default_factory=set)
    _out: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._weights = {task.name: task.weight for task in self.run.tasks if task.weight}
        self._restart(0)

    def _restart(self, version: int) -> None:
        """A scheduler was created, which goes on at `version`."""
        self._mixture, self._next = Mixture(self._weights, self.run.training.batch_groups), version
        self._out = set()
        self.batches = {step: batch for step, batch in self.batches.items() if step < version}

    def _change_mixture(self) -> None:
        if active := [task for task in self._weights if task not in self._out]:
            self._mixture.only(active, self._next)

    def see(self, event: AnyEvent) -> None:
        match event:
            case RunStarted():
                self.alpha, self.end = event.alpha, ""
                self._open.clear()  # a kill ends what was under way
                self._restart(event.version)
            case RolledBack():
                self._restart(event.version)
            case GroupStarted():
                self.started.add(event.group)
            case GroupDropped():
                self.dropped[event.group] = event.reason
            case Quarantined() if event.task not in self._out:
                self._out.add(event.task)
                self._change_mixture()
            case Released():
                self._out.discard(event.task)
                self._change_mixture()
            case BatchTaken():
                self.batches[event.step] = event
                self.quotas[event.step] = self._mixture.quota(event.step)
                self._next = event.step + 1
            case TrajectoryStarted():
                self._open.add(event.trajectory)
            case TrajectoryEnded():
                self._open.discard(event.trajectory)
                self.ends[event.trajectory] += 1
            case RunEnded():
                self.unended |= self._open
                self.end = event.reason
            case _:
                pass


@dataclass
class Evidence:
    """`ready`: trajectories that the ledger was seen to hold for training, at any moment of the run."""

    folder: Path
    history: History
    groups: dict[str, GroupState]
    checkpoint: int
    ready: Collection[str] = ()

    @property
    def finished(self) -> bool:
        return self.history.end == "finished"

    @property
    def trained(self) -> Counter[str]:
        return Counter(group for batch in self.history.batches.values() for group in batch.ids)


def collect(folder: Path, ready: Collection[str] = ()) -> Evidence:
    history = History(loading.load(folder / "run.yaml"))
    for event in read_events(folder / "events"):
        history.see(event)
    database = sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True)
    rows = database.execute("select id, task, size, state, step, reason, forgotten from groups").fetchall()
    row = database.execute("select value from progress where key = 'checkpoint'").fetchone()
    database.close()
    return Evidence(folder, history, {id: GroupState(*rest) for id, *rest in rows}, row[0] if row else 0, ready)


def trained_once(seen: Evidence) -> Iterator[str]:
    yield from (f"group {group} is in {times} batches" for group, times in seen.trained.items() if times > 1)


def nothing_lost(seen: Evidence) -> Iterator[str]:
    for trajectory in seen.ready:
        group = seen.groups.get(trajectory.rsplit(".", 1)[0])
        if group is None:
            yield f"trajectory {trajectory} was ready, and its group is gone"
    if not seen.finished:
        return
    yield from (f"group {group} started and is gone" for group in seen.history.started - seen.groups.keys())
    for id, group in seen.groups.items():
        if group.state == "leased":
            yield f"group {id} is still leased to step {group.step}"


def ledger_has_what_was_trained(seen: Evidence) -> Iterator[str]:
    """Up to the checkpoint: what follows it would be trained again."""
    logged = {(g, step) for step, batch in seen.history.batches.items() if step < seen.checkpoint for g in batch.ids}
    consumed = {(id, group.step) for id, group in seen.groups.items() if group.state == "consumed"}
    yield from (f"group {g} was trained by step {s} and is not consumed by it" for g, s in logged - consumed)
    yield from (f"group {g} is consumed by step {s}, which did not train it" for g, s in consumed - logged)


def steps_follow_each_other(seen: Evidence) -> Iterator[str]:
    steps = sorted(seen.history.batches)
    yield from (f"step {step} is missing" for step in range(len(steps)) if step not in seen.history.batches)
    wanted = seen.history.run.training.steps
    if seen.finished and (len(steps), seen.checkpoint) != (wanted, wanted):
        yield f"the run finished with {len(steps)} batches and a checkpoint of version {seen.checkpoint}, not {wanted}"


def bound_kept(seen: Evidence) -> Iterator[str]:
    alpha = seen.history.alpha
    for step, batch in seen.history.batches.items():
        if batch.staleness and max(batch.staleness) > alpha:
            yield f"step {step} trained tokens {max(batch.staleness)} versions old; the bound is {alpha}"


def mixture_exact(seen: Evidence) -> Iterator[str]:
    for step, batch in seen.history.batches.items():
        wanted = {task: count for task, count in seen.history.quotas[step].items() if count}
        if {task: count for task, count in batch.groups.items() if count} != wanted:
            yield f"step {step} has {dict(batch.groups)} groups, not {wanted}"


def drops_counted(seen: Evidence) -> Iterator[str]:
    for id, group in seen.groups.items():
        if group.state == "dropped" and not group.reason:
            yield f"group {id} was dropped without a reason"
        elif group.state == "dropped" and id not in seen.history.dropped:
            yield f"group {id} was dropped ({group.reason}), which the log does not say"


def trajectories_end(seen: Evidence) -> Iterator[str]:
    yield from (f"trajectory {one} has no outcome" for one in seen.history.unended)


def only_good_members_trained(seen: Evidence) -> Iterator[str]:
    """Of groups whose trajectories are still there: enough members, each with a reward and tokens within the bound."""
    ledger = SqliteLedger.open_readonly(seen.folder / "ledger.sqlite")
    try:
        for id, group in seen.groups.items():
            if group.state != "consumed" or group.step is None or group.forgotten:
                continue
            members = [one for one in ledger.group(id, 10_000) if one.outcome.trainable]
            if len(members) < group.size:
                yield f"group {id} was trained with {len(members)} good members of {group.size}"
            for one in members[: group.size]:
                if one.reward is None:
                    yield f"trajectory {one.id} was trained without a reward"
                if one.oldest is not None and group.step - one.oldest > seen.history.alpha:
                    yield f"trajectory {one.id} of version {one.oldest} was trained by step {group.step}"
    finally:
        ledger.close()


def checkpoint_whole(seen: Evidence) -> Iterator[str]:
    if seen.checkpoint == 0:
        return
    folder = seen.folder / "checkpoints" / f"{seen.checkpoint:06d}"
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        yield f"the ledger is at version {seen.checkpoint}, whose checkpoint is not there"
    elif wrong := damaged(files):
        yield f"the checkpoint of version {seen.checkpoint} is damaged: {wrong}"


def weights_good(seen: Evidence) -> Iterator[str]:
    if not seen.finished:
        return
    files = sorted((seen.folder / "model").glob("*.safetensors"))
    if not files:
        yield "the run finished without a model"
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if not torch.isfinite(file.get_tensor(name)).all():
                    yield f"{name} of the model has values that are not finite"


CHECKS: dict[str, Callable[[Evidence], Iterator[str]]] = {
    "nothing trained twice": trained_once,
    "nothing lost": nothing_lost,
    "ledger and log agree": ledger_has_what_was_trained,
    "every step once": steps_follow_each_other,
    "bound kept": bound_kept,
    "mixture exact": mixture_exact,
    "every drop counted": drops_counted,
    "every trajectory ends": trajectories_end,
    "only good members trained": only_good_members_trained,
    "checkpoint whole": checkpoint_whole,
    "weights finite": weights_good,
}


def audit(folder: Path, ready: Collection[str] = ()) -> list[Violation]:
    seen = collect(folder, ready)
    return [Violation(name, what) for name, check in CHECKS.items() for what in check(seen)]
