"""Writes the ledger in a thread, many records in one transaction.

Invariants: records are written in the order of the calls; the event log is flushed before each transaction, so the
ledger never has what the log has not; `commit` and `recover` return after everything before them is written. A kill
loses at most the records of the last `WRITE_S` seconds: what they describe is done again, nothing is trained twice,
because a checkpoint's transaction comes after those of its batches. A failed write is raised by the next call.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

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
        with self._writing:
            self._write()
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
                self._flush_log()
                with self._ledger.transaction():
                    for _ in range(len(self._waiting)):
                        self._waiting.popleft()()
        except Exception as error:
            self._error = error
            raise
