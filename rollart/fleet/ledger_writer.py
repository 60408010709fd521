"""Writes the ledger in a thread, many records in one transaction.

Invariants: records are written in the order of the calls; the event log is flushed before each transaction, so the
ledger never has what the log has not; `commit` and `recover` return after everything before them is written. A kill
loses at most the records of the last `WRITE_S` seconds: what they describe is done again, nothing is trained twice,
because a checkpoint's transaction comes after those of its batches. While the disk is full, records wait in memory, for
at most `FULL_S` seconds. Any other failed write is raised by the next call.
"""

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import EDQUOT, ENOSPC
from functools import partial

from rollart.core.errors import DiskFull
from rollart.core.event_log import FULL_S
from rollart.core.types import Trajectory
from rollart.rollout.ledger import GroupRecord, Recovery, SqliteLedger

WRITE_S = 1.0


class LedgerWriter:
    """Implements `rollart.rollout.ledger.Ledger`. The ledger stays the caller's to close."""

    def __init__(self, ledger: SqliteLedger, flush_log: Callable[[], None]) -> None:
        self._ledger, self._flush_log = ledger, flush_log
        self._waiting: deque[Callable[[], None]] = deque()
        self._writing, self._stop = threading.Lock(), threading.Event()
        self._error: Exception | None = None
        self._full_since: float | None = None
        self._thread = threading.Thread(target=self._write_often, name="ledger", daemon=True)
        self._thread.start()

    def start(self, group: GroupRecord) -> None:
        self._put(partial(self._ledger.start, group))

    def add(self, trajectory: Trajectory, *, held_out: bool = False) -> None:
        self._put(partial(self._ledger.add, trajectory, held_out=held_out))

    def lease(self, step: int, groups: Iterable[str]) -> None:
        self._put(partial(self._ledger.lease, step, list(groups)))

    def drop(self, group: str, reason: str) -> None:
        self._put(partial(self._ledger.drop, group, reason))

    def quarantine(self, task: str, times: int) -> None:
        self._put(partial(self._ledger.quarantine, task, times))

    def release(self, task: str) -> None:
        self._put(partial(self._ledger.release, task))

    def commit(self, version: int) -> None:
        """Raises DiskFull; then the checkpoint does not count, and the run can go on."""
        with self._writing:
            self._write()
            with _room():
                self._ledger.commit(version)
        self._put(partial(self._ledger.forget, version))

    def recover(self) -> Recovery:
        with self._writing:
            self._write()
            return self._ledger.recover()

    def close(self) -> None:
        """Raises the error of the last write."""
        self._stop.set()
        self._thread.join()
        with self._writing:
            self._write()

    def _put(self, record: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        self._waiting.append(record)

    def _write_often(self) -> None:
        while not self._stop.wait(WRITE_S) and self._error is None:
            with self._writing, suppress(Exception):  # raised again by the next call, where it can end the run
                self._write()

    def _write(self) -> None:
        if self._error is not None:
            raise self._error
        try:
            if self._waiting:
                self._write_all()
            self._full_since = None
        except DiskFull as error:
            now = time.monotonic()
            self._full_since = self._full_since or now
            if now - self._full_since > FULL_S:
                self._error = error
            raise
        except Exception as error:
            self._error = error
            raise

    def _write_all(self) -> None:
        with _room():
            self._flush_log()
            records = [self._waiting.popleft() for _ in range(len(self._waiting))]
            try:
                with self._ledger.transaction():
                    for record in records:
                        record()
            except sqlite3.OperationalError:
                self._waiting.extendleft(reversed(records))
                raise


@contextmanager
def _room() -> Iterator[None]:
    """Raises DiskFull for the errors of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT):
            raise
        raise DiskFull(f"the ledger could not be written: {error}") from error
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise
        raise DiskFull(f"the ledger could not be written: {error}") from error
