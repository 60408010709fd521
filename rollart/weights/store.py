"""The weight store: versions of the policy in a folder that processes of one host share, usually in shared memory.

Invariants: a version never changes. A shard is three files, `{version}-{id}.{shard}.` followed by `manifest`, which
appears when there is something to read; `sums`, to which the checksum of each bucket is appended once that is final;
and `data`. A shard with fewer sums than buckets is being written, by the process that holds the exclusive lock of
`sums`; without that lock, the writer died and the shard will never be complete. A new version reuses the data file of
one that is neither the newest complete one nor held by a reader; other old ones that no reader holds are removed. So
there are at most the versions that readers hold, the newest, and the one being written.
"""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from rollart.core.errors import RollartError
from rollart.weights.manifest import Manifest
from rollart.weights.shm_file import ShmCache, ShmFile, is_at, reserve, try_lock

SHARED_MEMORY = Path("/dev/shm")
SUM_BYTES = 8
POLL_S, LONGEST_POLL_S = 0.0005, 0.01
STEM = re.compile(r"(\d{8})-([0-9a-f]+)\.(\d+)")


class MissingVersion(RollartError):
    """The version is not in the store: never published, retired, or its publisher died."""


class BeingWritten(RollartError):
    """Another process is writing the same shard."""


def shared_folder(name: str) -> Path:
    """A folder in a machine's shared memory if it has any, else in its folder for temporary files."""
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    sweep(base)
    return base / f"rollart-{name}.{_owner(os.getpid())}"


def sweep(base: Path) -> list[Path]:
    """Remove the folders of processes of this machine that are gone, killed ones included; returns them."""
    host, gone = socket.gethostname(), []
    for folder in base.glob(f"rollart-*.{host}.*"):
        pid = folder.name.removesuffix(folder.suffix).rpartition(".")[2]
        if pid.isdecimal() and not folder.name.endswith(f".{_owner(int(pid))}"):
            shutil.rmtree(folder, ignore_errors=True)
            gone.append(folder)
    return gone


def _owner(pid: int) -> str:
    """Names a process for good: its id may be used again, but not with the same start."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "gone"
    return f"{socket.gethostname()}.{pid}.{started}"


class Store:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = ShmCache()
        root.mkdir(parents=True, exist_ok=True)

    def path(self, version: int, id: str, shard: int, kind: str) -> Path:
        return self.root / f"{version:08d}-{id}.{shard}.{kind}"

    def shards(self) -> list[tuple[int, str, int]]:
        """Version, id and shard of all that is readable, newest first."""
        found = []
        for path in self.root.glob("*.manifest"):
            if match := STEM.match(path.name):
                with contextlib.suppress(FileNotFoundError):  # retired just now
                    found.append((path.stat().st_mtime_ns, int(match[1]), match[2], int(match[3])))
        return [(version, id, shard) for _, version, id, shard in sorted(found, reverse=True)]

    def open(self, version: int, id: str, shard: int) -> "Shard":
        """Raises MissingVersion."""
        try:
            manifest = Manifest.decode(self.path(version, id, shard, "manifest").read_bytes())
            sums = os.open(self.path(version, id, shard, "sums"), os.O_RDONLY)
        except FileNotFoundError:
            raise MissingVersion(f"version {version} ({id}) is not in {self.root}") from None
        file = self.cache.hold(self.path(version, id, shard, "data"))
        if file is None:
            os.close(sums)
            raise MissingVersion(f"version {version} ({id}) has just been retired from {self.root}")
        opened = Shard(self.cache, manifest, file, sums)
        try:
            opened.check()
        except MissingVersion:
            opened.release()
            raise
        return opened

    def create(self, manifest: Manifest) -> "ShardWriter":
        """Begins a shard. Raises BeingWritten and NoRoom."""
        version, id, shard = manifest.version, manifest.id, manifest.shard
        self.root.mkdir(parents=True, exist_ok=True)  # a new run removes the folder of an earlier one
        sums = self._claim(manifest)
        try:
            data = self.path(version, id, shard, "data")
            self._data_file(manifest, data)
            file = self.cache.hold(data, writable=True)
            assert file is not None  # the data file of a version being written is not reused
            aside = self.path(version, id, shard, "part")
            aside.write_bytes(manifest.encode())
            aside.rename(aside.with_suffix(".manifest"))
        except BaseException:
            self.path(version, id, shard, "sums").unlink(missing_ok=True)
            os.close(sums)
            raise
        return ShardWriter(self.cache, manifest, file, sums)

    def _claim(self, manifest: Manifest) -> int:
        """The shard's `sums`, new and locked. What a dead writer left is removed, its sums before ours exist: readers
        of its data must never see our checksums. A complete shard stays: another writer has been faster."""
        name = manifest.version, manifest.id, manifest.shard
        path = self.path(*name, "sums")
        another = BeingWritten(f"version {manifest.version} is being written to {self.root} by another process")
        with open(path, "ab") as left:
            # One that another claimant has just removed must not be taken for ours: its files would be removed too.
            if not try_lock(left.fileno(), fcntl.LOCK_EX) or not is_at(left.fileno(), path):
                raise another
            complete = os.fstat(left.fileno()).st_size >= manifest.buckets * SUM_BYTES
            if complete and self.path(*name, "manifest").exists():
                raise another
            for kind in ("manifest", "data", "sums"):
                self.path(*name, kind).unlink(missing_ok=True)
        try:
            sums = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        except FileExistsError:
            raise another from None
        if not try_lock(sums, fcntl.LOCK_EX) or not is_at(sums, path):  # another came between
            os.close(sums)
            raise another
        return sums

    def _data_file(self, manifest: Manifest, target: Path) -> None:
        """Makes `target` a file of the right size: an unneeded one, else a new one."""
        taken, what = False, f"version {manifest.version} of the weights"
        for data in self._unneeded(manifest.shard):
            with contextlib.suppress(FileNotFoundError), open(data, "r+b") as file:  # else another process took it
                if not try_lock(file.fileno(), fcntl.LOCK_EX):
                    continue
                free = self._retire(data)  # a reader that has just found it will see that its name is gone
                if taken:
                    free.unlink()
                    continue
                reserve(file.fileno(), manifest.size, self.root, what)
                free.rename(target)
                taken = True
        if taken:
            return
        fd = os.open(target, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            reserve(fd, max(1, manifest.size), self.root, what)
        except BaseException:
            target.unlink()
            raise
        finally:
            os.close(fd)

    def _unneeded(self, shard: int) -> Iterator[Path]:
        """Data files of `shard`, except the newest complete one and those being written; readers may hold some."""
        known = [(version, id) for version, id, number in self.shards() if number == shard]
        newest = next((one for one in known if self._state(*one, shard) == "complete"), None)
        for data in self.root.glob(f"*.{shard}.data"):
            match = STEM.match(data.name)
            if match is None:
                yield data
                continue
            one = int(match[1]), match[2]
            if one != newest and self._state(*one, shard) != "written":
                yield data

    def _state(self, version: int, id: str, shard: int) -> str:
        """`complete`, being `written`, or `broken`."""
        with contextlib.suppress(FileNotFoundError), open(self.path(version, id, shard, "sums"), "rb") as sums:
            if not try_lock(sums.fileno(), fcntl.LOCK_SH):
                return "written"
            manifest = Manifest.decode(self.path(version, id, shard, "manifest").read_bytes())
            if os.fstat(sums.fileno()).st_size >= manifest.buckets * SUM_BYTES:
                return "complete"
        return "broken"

    def _retire(self, data: Path) -> Path:
        """Removes the name of a shard; returns the new path of its data."""
        for kind in (".manifest", ".sums", ".part"):
            data.with_suffix(kind).unlink(missing_ok=True)
        shard = data.name.split(".")[-2]
        free = self.root / f"free-{uuid.uuid4().hex}.{shard}.data"
        data.rename(free)
        return free

    def clear(self) -> None:
        """Removes all versions. Readers keep what they hold."""
        for kind in ("manifest", "sums", "data", "part"):
            for path in self.root.glob(f"*.{kind}"):
                path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Removes what no process holds or writes, and the folder if it is empty then."""
        for data in self.root.glob("*.data"):
            with open(data, "r+b") as file:
                if try_lock(file.fileno(), fcntl.LOCK_EX):
                    self._retire(data).unlink()
        with contextlib.suppress(OSError):  # not empty
            self.root.rmdir()

    def close(self) -> None:
        """Removes the store and all its versions."""
        if self.root.exists():
            self.clear()
            with contextlib.suppress(OSError):  # other files are not ours
                self.root.rmdir()
        self.cache.clear()


class Shard:
    """A shard held for reading until `release`. Only buckets whose `sum` has returned may be read from `data`."""

    def __init__(self, cache: ShmCache, manifest: Manifest, file: ShmFile, sums: int) -> None:
        self.manifest = manifest
        self.data = file.view[: manifest.size].toreadonly()
        self._cache, self._file, self._sums = cache, file, sums

    @property
    def ready(self) -> int:
        """The number of final buckets."""
        return os.fstat(self._sums).st_size // SUM_BYTES

    def sum(self, bucket: int, patience: float) -> int:
        """The checksum of a bucket, once that is final. Raises MissingVersion after `patience` seconds."""
        if not self.wait(bucket, patience):
            version = self.manifest.version
            raise MissingVersion(f"bucket {bucket} of version {version} was not published within {patience:g} s")
        return int.from_bytes(os.pread(self._sums, SUM_BYTES, bucket * SUM_BYTES), "little")

    def sums(self, first: int) -> bytes:
        """The checksums of all final buckets from `first` on."""
        return os.pread(self._sums, self.manifest.buckets * SUM_BYTES, first * SUM_BYTES)

    def wait(self, bucket: int, seconds: float) -> bool:
        """Whether a bucket is final within `seconds`. Raises MissingVersion as soon as it never will be."""
        deadline, pause = time.monotonic() + seconds, POLL_S
        while self.ready <= bucket:
            self.check()
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(LONGEST_POLL_S, pause * 2)
        return True

    def check(self) -> None:
        """Raises MissingVersion if it is incomplete and its writer is dead."""
        if self.ready < self.manifest.buckets and try_lock(self._sums, fcntl.LOCK_SH):
            fcntl.flock(self._sums, fcntl.LOCK_UN)
            if self.ready < self.manifest.buckets:
                version = self.manifest.version
                raise MissingVersion(f"version {version} will never be complete: its publisher ended half-way")

    def release(self) -> None:
        self._cache.release(self._file)
        os.close(self._sums)


class ShardWriter:
    """A shard being written. Use as a context manager: if incomplete at its end, it never will be complete."""

    def __init__(self, cache: ShmCache, manifest: Manifest, file: ShmFile, sums: int) -> None:
        self.manifest = manifest
        self.data = file.view[: manifest.size]
        self._cache, self._file, self._sums = cache, file, sums

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._cache.release(self._file)
        os.close(self._sums)

    def finish(self, checksum: int) -> None:
        """The next bucket is final."""
        os.write(self._sums, checksum.to_bytes(SUM_BYTES, "little"))
