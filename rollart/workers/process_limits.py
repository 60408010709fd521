"""Limits of forked processes: memory, processes, file sizes, and the log they all write to.

The invariants:
- Each forked process has its own limits, for itself and all that it starts. What exceeds them is killed with its group,
  and the reason is known.
- Where the host may make control groups (cgroup v2), the kernel counts memory and processes. Elsewhere the kernel
  limits the memory of each single process (RLIMIT_DATA), and the host adds up those of a group every `PERIOD_S`.
- The log of the host is never much larger than its limit: what is older than that is dropped.

Standard library only, Python 3.9 or later.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

PERIOD_S, CHECKED_PER_S = 1.0, 200  # a check costs about 30 microseconds for each process
OOM_SCORE = 500  # killed before controller, trainer and engines when the machine runs out of memory
CGROUPS = Path("/sys/fs/cgroup")
MB = 2**20


@dataclass(frozen=True)
class ProcessLimits:
    """Of one forked process and all that it starts; `log` is the host's. Megabytes, and a number; 0: no limit."""

    memory: int = 0
    processes: int = 0
    file: int = 0
    log: int = 0

    def hint(self, error: BaseException) -> str:
        """The limit that raised this."""
        if isinstance(error, MemoryError) and self.memory:
            return f"; the limit is {self.memory} MB of memory (`limits.memory`)"
        if isinstance(error, OSError) and error.errno == errno.EFBIG and self.file:
            return f"; the limit is {self.file} MB for a file (`limits.file`)"
        return ""

    def enter(self) -> None:
        """Called in the forked process, before any foreign code."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for kind, megabytes in ((resource.RLIMIT_DATA, self.memory), (resource.RLIMIT_FSIZE, self.file)):
            _, hard = resource.getrlimit(kind)
            if megabytes and (hard == resource.RLIM_INFINITY or megabytes * MB < hard):
                resource.setrlimit(kind, (megabytes * MB, megabytes * MB))
        with contextlib.suppress(OSError):
            score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)  # with fewer pages to copy than a Path takes
            os.write(score, b"%d" % OOM_SCORE)
            os.close(score)

    def broken(self, memory: int, processes: int) -> str:
        """Why a group must be killed, if it must; `memory` in bytes."""
        if self.memory and memory > self.memory * MB:
            return f"was killed: it used more than {self.memory} MB of memory (`limits.memory`)"
        if self.processes and processes > self.processes:
            return f"was killed: it had more than {self.processes} processes (`limits.processes`)"
        return ""


def usage(pid: int) -> tuple[int, int]:
    """Bytes of memory and number of processes of a process and its descendants. Files that they map do not count."""
    memory, found = 0, [pid]
    for each in found:
        with contextlib.suppress(OSError, ValueError):  # it ended meanwhile
            _, resident, shared, *_ = map(int, Path(f"/proc/{each}/statm").read_text().split())
            memory += resident - shared
            for thread in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return memory * os.sysconf("SC_PAGESIZE"), len(found)


class Groups:
    """A control group for each forked process, in a folder where this process may make them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count(1)
        self._made: dict[int, Path] = {}

    @classmethod
    def find(cls, root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Groups | None:
        """Our own group or its parent, if it hands memory and processes on to groups in it and we may make one."""
        try:
            path = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
        except (OSError, StopIteration):
            return None
        here = root / path.lstrip("/")
        for folder in (here, here.parent) if here != root else (here,):
            with contextlib.suppress(OSError):
                given = (folder / "cgroup.subtree_control").read_text().split()
                if {"memory", "pids"} <= set(given) and os.access(folder, os.W_OK):
                    return cls(folder)
        return None

    def add(self, pid: int, limits: ProcessLimits) -> None:
        """Raises OSError."""
        group = self._folder / f"rollart-{os.getpid()}-{next(self._numbers)}"
        group.mkdir()
        self._made[pid] = group
        for name, value in (("memory.max", limits.memory * MB), ("pids.max", limits.processes)):
            if value:
                (group / name).write_text(str(value))
        for name, setting in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
            with contextlib.suppress(OSError):  # without swap, or an older kernel
                (group / name).write_text(setting)
        (group / "cgroup.procs").write_text(str(pid))

    def broken(self, pid: int, limits: ProcessLimits) -> str:
        events = {name: self._count(pid, name, key) for name, key in (("memory", "oom_kill"), ("pids", "max"))}
        return limits.broken(
            limits.memory * MB + 1 if events["memory"] else 0, limits.processes + 1 if events["pids"] else 0
        )

    def _count(self, pid: int, name: str, key: str) -> int:
        try:
            lines = (self._made[pid] / f"{name}.events").read_text().splitlines()
        except (KeyError, OSError):
            return 0
        return sum(int(value) for word, value in (line.split() for line in lines) if word == key)

    def remove(self, pid: int) -> None:
        group = self._made.pop(pid, None)
        if group is not None:
            with contextlib.suppress(OSError):  # before Linux 5.14
                (group / "cgroup.kill").write_text("1")
            with contextlib.suppress(OSError):  # its last processes are just ending: an empty folder stays
                group.rmdir()


class Watch:
    """Applies the limits to the processes of a host."""

    def __init__(self, limits: ProcessLimits) -> None:
        self.limits = limits
        self._groups = Groups.find()
        self._reasons: dict[int, str] = {}

    def period(self, processes: int) -> float:
        """Seconds between two checks of this number of processes."""
        return max(PERIOD_S, processes / CHECKED_PER_S)

    def add(self, pid: int) -> None:
        if self._groups is not None:
            try:
                self._groups.add(pid, self.limits)
            except OSError:
                self._groups = None  # not ours after all

    def broken(self, pid: int) -> str:
        """Why the process must be killed, if it must. The first reason stays."""
        if pid not in self._reasons:
            counted = self._groups.broken(pid, self.limits) if self._groups is not None else ""
            reason = counted or self.limits.broken(*usage(pid))
            if not reason:
                return ""
            self._reasons[pid] = reason
        return self._reasons[pid]

    def ended(self, pid: int) -> str:
        """Why it was killed, if a limit is the reason."""
        counted = self._groups.broken(pid, self.limits) if self._groups is not None else ""
        if self._groups is not None:
            self._groups.remove(pid)
        return self._reasons.pop(pid, counted)

    def trim_log(self) -> None:
        """Keep the newest part of a log that is too large in a file beside it, and go on with an empty one."""
        size = self.limits.log * MB
        if not size:
            return
        about = os.fstat(2)
        if not stat.S_ISREG(about.st_mode) or about.st_size <= size:
            return
        path = Path("/proc/self/fd/2")
        with open(path, "rb") as log, open(f"{path.readlink()}.1", "wb") as older:
            log.seek(max(0, about.st_size - size))
            shutil.copyfileobj(log, older)
        os.ftruncate(2, 0)
