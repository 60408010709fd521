"""Reads a run folder as typed objects. Reading never changes the folder, and works while the run goes on."""

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import msgspec

from rollart.config import RunFile, loading
from rollart.core import run_folder
from rollart.core.errors import RollartError
from rollart.core.event_log import read_events
from rollart.core.events import AnyEvent, Event
from rollart.core.types import Trajectory
from rollart.observe.snapshot import Snapshot, StepPoint
from rollart.observe.summary import snapshot_of, summarise
from rollart.rollout.ledger import SqliteLedger, TrajectoryRow

T = TypeVar("T")
E = TypeVar("E", bound=Event)


class Records(Generic[T]):
    """Typed records that are read again each time they are iterated, so that a long run needs no memory.

    >>> list(Records(lambda: [1, 2]))
    [1, 2]
    """

    def __init__(self, read: Callable[[], Iterable[T]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[T]:
        return iter(self._read())

    def rows(self) -> Iterator[dict[str, Any]]:
        """One flat dict for each record: `{"values": {"loss": 1}}` becomes `{"values.loss": 1}`."""
        for record in self:
            yield dict(_flat(msgspec.to_builtins(record)))

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a column for each field. Raises RollartError if pandas is not installed."""
        return _installed("pandas").DataFrame.from_records(list(self.rows()))

    def to_arrow(self) -> Any:
        """A `pyarrow.Table` with a column for each field. Raises RollartError if pyarrow is not installed."""
        arrow = _installed("pyarrow")
        rows = list(self.rows())
        columns = dict.fromkeys(name for row in rows for name in row)
        return arrow.table({name: _column(arrow, [row.get(name) for row in rows]) for name in columns})


class RunFolder:
    """The folder of a run, as `rollart train`, `rollart eval` and `rollart simulate` leave it.

    Raises RollartError if there is no event log in `path`.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._log = run_folder.events_of(self.path)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def model(self) -> Path:
        """The trained model, in Hugging Face format. It exists once the run has finished."""
        return self.path / "model"

    @property
    def run(self) -> RunFile:
        """The run file, with all defaults and overrides. Raises ConfigError if it was written by another version."""
        return loading.load(self.path / "run.yaml")

    @overload
    def events(self) -> Records[AnyEvent]: ...

    @overload
    def events(self, *kinds: type[E]) -> Records[E]: ...

    def events(self, *kinds: type[Event]) -> Records[Any]:
        """All events in order, or those of some kinds: `run.events(TurnDone)`. `rollart.core.events` has all kinds."""
        return Records(lambda: read_events(self._log, *kinds))

    def steps(self) -> Records[StepPoint]:
        """One record for each optimizer step. Steps that a resume took back are left out."""
        return Records(lambda: self.snapshot().history)

    def trajectories(self, task: str | None = None, *, held_out: bool | None = None) -> Records[Trajectory]:
        """The trajectories in the ledger, in order of their start: turns, tokens, logprobs, policy versions.

        Args:
            task: Only those of this task.
            held_out: True for those of evaluations, False for those of training; by default both.
        """

        def read() -> Iterator[Trajectory]:
            with self._ledger() as ledger:
                yield from ledger.trajectories(task, held_out)

        return Records(read)

    def trajectory(self, id: str) -> Trajectory:
        """The trajectory whose id is, or starts with, `id`. Raises RollartError if there is none, or several."""
        with self._ledger() as ledger:
            return ledger.trajectory(id)

    def latest(self, count: int = 3) -> list[TrajectoryRow]:
        """Of each task, the last trajectories in the ledger that succeeded, and the last that did not."""
        with self._ledger() as ledger:
            return ledger.latest(count)

    def _ledger(self) -> contextlib.closing[SqliteLedger]:
        return contextlib.closing(SqliteLedger.open_readonly(self.path / "ledger.sqlite"))

    def snapshot(self) -> Snapshot:
        """Everything that `rollart show` prints, as one frozen object."""
        return snapshot_of(self.path)

    def summary(self) -> dict[str, Any]:
        """What `rollart show --json` prints: results by task, speed, utilisation, staleness, drops."""
        return summarise(self.snapshot()) | {"directory": str(self.path)}


def _flat(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flat({str(key): inner for key, inner in value.items()}, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise RollartError(f"this needs the package {name}, which is not installed: pip install {name}") from None


def _column(arrow: Any, values: list[Any]) -> Any:
    """An environment may put values of several types under one name; these become JSON text."""
    try:
        return arrow.array(values)
    except (arrow.ArrowInvalid, arrow.ArrowTypeError):
        return arrow.array([None if value is None else msgspec.json.encode(value).decode() for value in values])
