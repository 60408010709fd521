"""The durable record of groups and trajectories: open, leased to a step, consumed with a checkpoint, or dropped.

Invariants: a trajectory survives a kill once `add` has returned; a group is leased by at most one step; it becomes
consumed only in the transaction that records the checkpoint containing its step. So after a crash, leases of steps that
no checkpoint contains are open again, and nothing that a checkpoint contains can be leased again. Of groups that no
checkpoint can return to, the trajectories of the last `keep` steps stay; those of held-out episodes always do.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self

import msgspec
import zstandard

from rollart.core.errors import RollartError
from rollart.core.packed import stored, turn_count
from rollart.core.types import Outcome, Trajectory

State = Literal["open", "leased", "consumed", "dropped"]

RECENT = 1024  # trajectories of a task that a resumed run knows the success of
_QUARANTINED = "out "  # before the name of a task, a key of `progress`

_SCHEMA = """
create table if not exists progress (key text primary key, value integer not null) without rowid;
create table if not exists groups (
    id text primary key, task text not null, idx integer not null, seed integer not null, size integer not null,
    version integer not null, state text not null, step integer, reason text not null default '',
    forgotten integer not null default 0
) without rowid;
create index if not exists groups_by_state on groups (state, step);
create table if not exists trajectories (
    id text primary key, grp text not null, member integer not null, task text not null, outcome text not null,
    trainable integer not null, held_out integer not null, reward real, success integer, turns integer not null,
    tokens integer not null, started real not null, seconds real not null, reason text not null, body blob not null
);
create index if not exists trajectories_by_group on trajectories (grp);
"""


class TrajectoryRow(NamedTuple):
    """A trajectory in the ledger, in a list."""

    id: str
    outcome: str
    reward: float | None
    turns: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class GroupRecord:
    id: str
    task: str
    index: int
    seed: int
    size: int
    version: int


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group that was not consumed when the run stopped, with the trainable trajectories it already has."""

    record: GroupRecord
    launched: int
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Recovery:
    """Where a stopped run continues: at the policy `version` of its last checkpoint. `quarantined` are the tasks that
    were, and how often; `recent` has the success of the last trajectories of each task, in order."""

    version: int
    groups: tuple[OpenGroup, ...]
    next_index: dict[str, int]
    quarantined: dict[str, int] = field(default_factory=dict)
    recent: dict[str, list[bool]] = field(default_factory=dict)


class Ledger(Protocol):
    """What the control plane needs of a ledger. A simulation has one that keeps nothing."""

    def start(self, group: GroupRecord) -> None: ...

    def add(self, trajectory: Trajectory, *, held_out: bool = False) -> None: ...

    def lease(self, step: int, groups: Iterable[str]) -> None: ...

    def drop(self, group: str, reason: str) -> None: ...

    def quarantine(self, task: str, times: int) -> None: ...

    def release(self, task: str) -> None: ...

    def commit(self, version: int) -> None: ...


class TrajectoryCodec:
    """Trajectories as a ledger keeps them. Its compressor is for one thread at a time."""

    def __init__(self) -> None:
        self._compress = zstandard.ZstdCompressor(level=1).compress
        self._decompress = zstandard.ZstdDecompressor().decompress
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Trajectory).decode

    def encode(self, trajectory: Trajectory) -> bytes:
        return self._compress(self._encode(trajectory))

    def decode(self, body: bytes) -> Trajectory:
        return self._decode(self._decompress(body))


class SqliteLedger:
    """`keep`: steps whose trajectories stay after a checkpoint consumed them; None: all."""

    def __init__(self, connection: sqlite3.Connection, keep: int | None = None) -> None:
        self._db, self._keep = connection, keep
        self._codec = TrajectoryCodec()

    @classmethod
    def open(cls, path: Path, keep: int | None = None) -> Self:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.execute("pragma journal_mode = wal")
        # A killed process loses nothing at this level; only a power cut could lose the last transactions.
        connection.execute("pragma synchronous = normal")
        connection.executescript(_SCHEMA)
        return cls(connection, keep)

    @classmethod
    def open_readonly(cls, path: Path) -> Self:
        if not path.exists():
            raise RollartError(f"{path} does not exist; is this a run folder?")
        return cls(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None))

    def close(self) -> None:
        with suppress(sqlite3.OperationalError):  # somebody reads it, or it is read-only
            self._db.execute("pragma journal_mode = delete")  # else readers would leave files in the folder
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What is written inside is written together; one within another is part of it."""
        if self._db.in_transaction:
            yield
            return
        with self._db:
            self._db.execute("begin")
            yield

    def start(self, group: GroupRecord) -> None:
        self._db.execute(
            "insert into groups (id, task, idx, seed, size, version, state) values (?, ?, ?, ?, ?, ?, 'open')",
            (group.id, group.task, group.index, group.seed, group.size, group.version),
        )

    def add(self, trajectory: Trajectory, *, held_out: bool = False) -> None:
        self._db.execute(
            "insert or replace into trajectories values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                trajectory.id,
                trajectory.group,
                trajectory.member,
                trajectory.task,
                trajectory.outcome.value,
                trajectory.outcome.trainable,
                held_out,
                trajectory.reward,
                trajectory.success,
                turn_count(trajectory),
                trajectory.total_tokens,
                trajectory.started_s,
                trajectory.seconds,
                trajectory.reason,
                stored(trajectory, self._codec.encode),
            ),
        )

    def lease(self, step: int, groups: Iterable[str]) -> None:
        """Give these groups to optimizer step `step`."""
        with self.transaction():
            for group in groups:
                changed = self._db.execute(
                    "update groups set state = 'leased', step = ? where id = ? and state = 'open'", (step, group)
                ).rowcount
                if changed != 1:
                    raise RollartError(f"group {group} is not open, so step {step} cannot lease it")

    def drop(self, group: str, reason: str) -> None:
        self._db.execute("update groups set state = 'dropped', reason = ? where id = ?", (reason, group))

    def quarantine(self, task: str, times: int) -> None:
        """The task was quarantined, or failed a probe, `times` in all."""
        self._db.execute("insert or replace into progress values (?, ?)", (_QUARANTINED + task, times))

    def release(self, task: str) -> None:
        self._db.execute("delete from progress where key = ?", (_QUARANTINED + task,))

    def commit(self, version: int) -> None:
        """The checkpoint of `version` is complete: the steps before it consumed their leases for good, power cuts
        included, because older checkpoints are deleted next."""
        self._db.execute("pragma synchronous = full")
        with self.transaction():
            self._db.execute("update groups set state = 'consumed' where state = 'leased' and step < ?", (version,))
            self._db.execute("insert or replace into progress values ('checkpoint', ?)", (version,))
        self._db.execute("pragma synchronous = normal")

    def forget(self, version: int) -> None:
        """Delete the trajectories that neither a resume from `version` nor `keep` needs; the groups stay, as counts."""
        if self._keep is not None:
            old = version - self._keep
            self._db.execute(
                "delete from trajectories where not held_out and grp in (select id from groups"
                " where not forgotten and (state = 'consumed' and step < ?1 or state = 'dropped' and version < ?1))",
                (old,),
            )
            self._db.execute(
                "update groups set forgotten = 1"
                " where not forgotten and (state = 'consumed' and step < ?1 or state = 'dropped' and version < ?1)",
                (old,),
            )

    @property
    def checkpoint(self) -> int:
        """The version of the last one that was committed, or 0."""
        row = self._db.execute("select value from progress where key = 'checkpoint'").fetchone()
        return int(row[0]) if row else 0

    def recover(self) -> Recovery:
        """Reopen the leases that no checkpoint contains, and list what is open."""
        self._db.execute("update groups set state = 'open', step = null where state = 'leased'")
        records = [
            GroupRecord(*fields)
            for fields in self._db.execute(
                "select id, task, idx, seed, size, version from groups where state = 'open' order by version, idx"
            )
        ]
        indices = self._db.execute("select task, max(idx) + 1 from groups group by task").fetchall()
        quarantined = self._db.execute(
            "select substr(key, ?), value from progress where key glob ?", (len(_QUARANTINED) + 1, _QUARANTINED + "*")
        )
        return Recovery(
            version=self.checkpoint,
            groups=tuple(map(self._open_group, records)),
            next_index=dict(indices),
            quarantined=dict(quarantined.fetchall()),
            recent={task: self._recent(task) for task, _ in indices},
        )

    def _recent(self, task: str) -> list[bool]:
        rows = self._db.execute(
            "select coalesce(success, reward > 0) from trajectories where task = ? and trainable and not held_out"
            " order by started desc limit ?",
            (task, RECENT),
        )
        return [bool(row[0]) for row in rows][::-1]

    def _open_group(self, record: GroupRecord) -> OpenGroup:
        rows = self._db.execute(
            "select member, trainable, body from trajectories where grp = ? order by member", (record.id,)
        ).fetchall()
        launched = rows[-1][0] + 1 if rows else 0
        return OpenGroup(record, launched, tuple(self._codec.decode(body) for _, trainable, body in rows if trainable))

    def has_all(self, ids: Iterable[str]) -> bool:
        find = "select 1 from trajectories where id = ?"
        return all(self._db.execute(find, (id,)).fetchone() is not None for id in ids)

    def trajectory(self, prefix: str) -> Trajectory:
        """The one whose id is, or starts with, `prefix`."""
        rows = self._db.execute(
            "select id, body from trajectories where substr(id, 1, length(?1)) = ?1 order by id = ?1 desc limit 2",
            (prefix,),
        ).fetchall()
        if not rows:
            raise RollartError(
                f"no trajectory's id starts with {prefix!r}; `rollart trajectory RUN_DIR` lists some, and those of"
                " steps older than ledger.keep were deleted"
            )
        if len(rows) == 2 and rows[0][0] != prefix:
            raise RollartError(f"several ids start with {prefix!r}, for instance {rows[0][0]} and {rows[1][0]}")
        return self._codec.decode(rows[0][1])

    def latest(self, count: int) -> list[TrajectoryRow]:
        """Of each task, the last ones that succeeded and the last ones that did not."""
        kind = "partition by task, coalesce(success, 0) order by started desc, id"
        rows = self._db.execute(
            "select id, outcome, reward, turns, tokens, seconds from ("
            f"select *, row_number() over ({kind}) as place from trajectories where trainable"
            ") where place <= ? order by task, coalesce(success, 0) desc, place",
            (count,),
        )
        return [TrajectoryRow(*row) for row in rows]

    def trajectories(self, task: str | None = None, held_out: bool | None = None) -> Iterator[Trajectory]:
        """In order of their start; of one task, or of evaluations or training only."""
        rows = self._db.execute(
            "select body from trajectories where (?1 is null or task = ?1) and (?2 is null or held_out = ?2)"
            " order by started, id",
            (task, held_out),
        )
        return (self._codec.decode(body) for (body,) in rows)

    def group(self, id: str, limit: int = 64) -> list[Trajectory]:
        """The trajectories of a group, by member."""
        rows = self._db.execute("select body from trajectories where grp = ? order by member limit ?", (id, limit))
        return [self._codec.decode(body) for (body,) in rows]

    def evaluations(self, task: str, member: int, limit: int = 64) -> list[Trajectory]:
        """The same held-out episode at every version that played it, in order."""
        rows = self._db.execute(
            "select body from trajectories where held_out = 1 and task = ? and member = ? order by started limit ?",
            (task, member, limit),
        )
        return [self._codec.decode(body) for (body,) in rows]

    def scored(self, limit: int, tasks: Sequence[str] = ()) -> list[Trajectory]:
        """The last trajectories that reached scoring, including those whose reward failed."""
        outcomes = [Outcome.FINISHED.value, Outcome.TRUNCATED.value, Outcome.REWARD_FAILED.value]
        of_tasks = f"and task in ({', '.join('?' * len(tasks))})" if tasks else ""
        rows = self._db.execute(
            f"select body from trajectories where outcome in (?, ?, ?) {of_tasks} order by started desc limit ?",
            (*outcomes, *tasks, limit),
        )
        return [self._codec.decode(body) for (body,) in rows]

    def group_states(self) -> dict[str, int]:
        return dict(self._db.execute("select state, count(*) from groups group by state"))
