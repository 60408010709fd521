"""A shard's bytes: a file in shared memory, mapped into this process, under a lock that the kernel frees at its end.

Invariants: a reader holds the file's shared lock for as long as anything points into the mapping; a writer has held the
exclusive lock after the file's old name was gone, so no reader sees what is overwritten. A mapping outlives the hold:
files are reused for later versions, and their page tables are kept. Space is reserved before it is touched, so a full
file system is an error and not a fatal signal.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import threading
from pathlib import Path

from rollart.core.errors import RollartError


class NoRoom(RollartError):
    """The folder of the weights has no space left."""


class ShmFile:
    """A mapped file, which owns `fd` and takes no lock."""

    def __init__(self, fd: int, writable: bool) -> None:
        self.fd, self.size = fd, os.fstat(fd).st_size
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.view = memoryview(mmap.mmap(fd, self.size, flags=mmap.MAP_SHARED, prot=access))

    def __del__(self) -> None:
        os.close(self.fd)  # frees the lock too

    @property
    def gone(self) -> bool:
        return os.fstat(self.fd).st_nlink == 0


class ShmCache:
    """The mappings of this process, by file, so that a reused file is not mapped again."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, bool], ShmFile] = {}
        self._holds: dict[ShmFile, int] = {}
        self._lock = threading.Lock()

    def hold(self, path: Path, writable: bool = False) -> ShmFile | None:
        """The file at `path` under a shared lock; None if it is being reused for another version, or gone."""
        with self._lock:
            self._forget()
            try:
                file = self._mapped(path, writable)
            except FileNotFoundError:
                return None
            if not self._holds.get(file) and not try_lock(file.fd, fcntl.LOCK_SH):
                return None
            self._holds[file] = self._holds.get(file, 0) + 1
        if is_at(file.fd, path):  # it may have been reused meanwhile
            return file
        self.release(file)
        return None

    def release(self, file: ShmFile) -> None:
        with self._lock:
            self._holds[file] -= 1
            if not self._holds[file]:
                del self._holds[file]
                fcntl.flock(file.fd, fcntl.LOCK_UN)

    def _mapped(self, path: Path, writable: bool) -> ShmFile:
        about = path.stat()
        key = about.st_ino, writable
        file = self._files.get(key)
        if file is None or file.size < about.st_size or file.gone:
            file = self._files[key] = ShmFile(os.open(path, os.O_RDWR if writable else os.O_RDONLY), writable)
        return file

    def _forget(self) -> None:
        """Unmaps removed files: their memory is freed with the last mapping."""
        for key, file in list(self._files.items()):
            if file.gone and file not in self._holds:
                del self._files[key]

    def clear(self) -> None:
        with self._lock:
            self._files.clear()
            self._holds.clear()


def is_at(fd: int, path: Path) -> bool:
    """Whether `path` names this open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(fd))
    return False


def try_lock(fd: int, kind: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        return True
    return False


def reserve(fd: int, size: int, folder: Path, what: str) -> None:
    """Raises NoRoom."""
    if os.fstat(fd).st_size >= size:
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(folder).free
        raise NoRoom(
            f"{what} needs {size / 2**20:.1f} MB in {folder}, where {free / 2**20:.1f} MB are free; "
            "free some, or name a folder with more space as `weights` in the run file"
        ) from error
