"""A sandbox with one bash in it that lives from command to command. Standard library only, Python 3.9 or later.

The invariants:
- One command runs at a time, within its deadline and the limits; one that breaks them is killed with all it started.
- Between commands nothing runs: what a command leaves in the background is killed when it ends, and the shell is
  stopped until the next one. A program that replaced the shell by `exec` and forged the end of its command is killed.
  Memory is checked while a command runs and when it has ended; meanwhile it cannot grow.
- Variables, functions and the current folder survive as long as the shell does. When it ends, by itself or because
  killing its children was not enough, the next command gets a new one and the files are still there.
- The end of a command, and of the shell, is reported on a pipe of its own, with a tag that is new each time. A command
  that forges it only ends its own turn early.
- Whatever a command does, `run` returns a CommandResult. SandboxError means that the sandbox broke.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from rollart.sandbox.bubblewrap import (
    ENDED,
    NO_MOUNTS,
    WORK,
    Bubblewrap,
    ExtraMounts,
    SandboxError,
    SandboxLimits,
    image,
    ready,
)
from rollart.sandbox.container import Container

SHELL = """\
exec 9>&2 2>/dev/null
while IFS= read -r __tag && IFS= read -r -d '' __command; do
  jobs >/dev/null
  eval "$__command" </dev/null >&9 2>&9
  printf '%s %d\\n' "$__tag" "$?"
done
"""
DEFAULT_LIMITS = SandboxLimits()
CHECK_S = 0.1  # between two checks of memory and files
START_S = 20.0
GRACE_S = 1.0  # until the shell goes on once its children are killed
COMMAND_BYTES = 32_000
FLOOD_BYTES = 64 * 2**20
LINE_BYTES = 4096
PIECE = 65536
CODE = re.compile(r"[0-9]{1,3}")
CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), 127)}


@dataclass(frozen=True)
class CommandResult:
    """`exit_code` is None if the command was killed or ended the shell; `note` is the reason."""

    output: str
    exit_code: int | None
    note: str = ""


class OutputBuffer:
    """The output of a command: `limit` bytes, half from the beginning and half from the end."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, piece: bytes) -> None:
        self.total += len(piece)
        room = self._half - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:]
        if len(self._tail) > 4 * self._half:
            del self._tail[: -self._half]

    def text(self) -> str:
        """Printable: control characters and invalid UTF-8 are escaped as `\\xNN`."""
        left_out = self.total - len(self._head) - self._half
        if left_out <= 0:
            return _printable(self._head + self._tail)
        head, tail = _printable(self._head), _printable(self._tail[-self._half :])
        return f"{head}\n[... {left_out:,} bytes left out ...]\n{tail}"


class WorkTooBig(Exception):
    """The content of the work folder cannot be packed."""


class Sandbox:
    """Starts at once, with `archive` (a tar) unpacked in the work folder; in an OCI `image`, or else on the programs of
    this machine. `spare` is a container that is starting already. Raises SandboxError."""

    def __init__(
        self,
        archive: bytes = b"",
        limits: SandboxLimits = DEFAULT_LIMITS,
        output: int = 4000,
        mounts: ExtraMounts = NO_MOUNTS,
        image: str | None = None,
        spare: Container | None = None,
    ) -> None:
        self._output = output
        self._line = b""
        self._shell, self._shell_tag = 0, ""
        self._image: tuple[str, ...] = ()
        self._bwrap = spare or (Container(image, limits, SHELL, mounts) if image else Bubblewrap(limits, SHELL, mounts))
        try:
            self._bwrap.wait()
            if archive and not self.unpack(archive):
                raise SandboxError("the files could not be unpacked in the sandbox: they are too many or too big")
            self._start_shell()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def processes(self) -> list[int]:
        """The ids on this machine of all processes inside, init first."""
        return [self._bwrap.init, *self._bwrap.processes()]

    def run(self, command: str, deadline: float = 10.0) -> CommandResult:
        """Raises SandboxError."""
        text = command.encode(errors="replace").replace(b"\0", b"")
        if len(text) > COMMAND_BYTES:
            note = f"the command has {len(text):,} bytes, more than {COMMAND_BYTES:,}; it was not run"
            return CommandResult("", None, note)
        if not self._shell:
            self._start_shell()
        tag, output = _tag(), OutputBuffer(self._output)
        end = time.monotonic() + deadline
        _, files = self._bwrap.used()
        self._bwrap.resume(self._shell)
        self._bwrap.send(f"{tag}\n".encode() + text + b"\0", end + GRACE_S)
        reply, broken = self._follow(output.add, (tag, self._shell_tag), end, lambda: self._broken(output, files))
        if reply is None:
            return self._stop(output, tag, broken or f"it was killed: it ran for more than {deadline:g} s")
        if reply[0] != tag:
            return self._ended(output, f"the shell ended with exit code {reply[1]}")
        return self._frozen(output, reply[1])

    def unpack(self, archive: bytes, deadline: float = 20.0) -> bool:
        """Put the files of a tar into the work folder; False if they do not fit. Raises SandboxError."""
        self._end_shell()
        tag, end = _tag(), time.monotonic() + deadline
        self._bwrap.send(f"\nunpack {tag} {len(archive)}\n".encode() + archive, end)
        reply, _ = self._follow(_discard, (tag,), end)
        if reply is None:
            raise SandboxError(f"the files were not unpacked in the sandbox within {deadline:g} s")
        return reply[1] == 0

    def pack(self, deadline: float = 20.0) -> bytes:
        """The work folder as a tar. The shell ends. Raises WorkTooBig or SandboxError."""
        self._end_shell()
        limit = 2 * self._bwrap.limits.disk * 2**20
        pieces: list[bytes] = []
        size = 0

        def keep(piece: bytes) -> None:
            nonlocal size
            size += len(piece)
            if size <= limit:
                pieces.append(piece)

        tag, end = _tag(), time.monotonic() + deadline
        self._bwrap.send(f"\npack {tag}\n".encode(), end)
        reply, _ = self._follow(keep, (tag,), end, lambda: "too big" if size > limit else "")
        if reply is None or reply[1] != 0 or size > limit:
            for pid in self._bwrap.processes():
                self._bwrap.kill(pid)
            raise WorkTooBig("the work folder cannot be packed: it is too big, or parts of it cannot be read")
        return b"".join(pieces)

    def close(self) -> None:
        self._bwrap.close()

    def _start_shell(self) -> None:
        self._drain(_discard)
        up, ended, end = _tag(), _tag(), time.monotonic() + START_S
        # The empty line ends what an earlier shell may have left unread; the first command does nothing.
        self._bwrap.send(f"\nshell {ended}\n{up}\n:\0".encode(), end)
        output = OutputBuffer(1000)
        reply, _ = self._follow(output.add, (up, ended), end)
        alive = self._bwrap.processes()
        if reply is None or reply[0] != up or len(alive) != 1:
            raise SandboxError(f"no shell could be started in the sandbox: {output.text()}")
        self._shell, self._shell_tag = alive[0], ended
        self._bwrap.clear(self._shell)
        self._image = image(self._shell)

    def _end_shell(self) -> None:
        if self._shell:
            self._bwrap.kill(self._shell)
            self._shell = 0
            if self._follow(_discard, (self._shell_tag,), time.monotonic() + START_S)[0] is None:
                raise SandboxError("the shell in the sandbox was killed, but its end was not reported")

    def _follow(
        self, keep: Callable[[bytes], None], tags: tuple[str, ...], end: float, broken: Callable[[], str] = lambda: ""
    ) -> tuple[tuple[str, int] | None, str]:
        """Read until one of `tags` comes, with its exit code: the reply. Else the broken limit, or "" at `end`."""
        bwrap, check_at = self._bwrap, time.monotonic() + CHECK_S
        while True:
            now = time.monotonic()
            if now >= check_at:
                check_at = now + CHECK_S
                if reason := broken():
                    return None, reason
            if now >= end:
                return None, ""
            found = ready([bwrap.replies, bwrap.output], min(check_at, end) - now)
            if bwrap.output in found:
                keep(self._read(bwrap.output))
            if bwrap.replies in found and (reply := self._reply(tags)):
                self._drain(keep)
                return reply, ""

    def _reply(self, tags: tuple[str, ...]) -> tuple[str, int] | None:
        """The next reply, if it is there. Other lines are old, or forged."""
        *lines, rest = (self._line + self._read(self._bwrap.replies)).split(b"\n")
        self._line = rest[-LINE_BYTES:]
        for line in lines:
            tag, _, code = line.decode(errors="replace").partition(" ")
            if tag in tags and CODE.fullmatch(code):
                return tag, int(code)
        return None

    def _drain(self, keep: Callable[[bytes], None]) -> None:
        """What was written before a reply is in the pipe by then; no more than a pipe holds."""
        for _ in range(16):
            if not ready([self._bwrap.output], 0.0):
                return
            keep(self._read(self._bwrap.output))

    def _read(self, descriptor: int) -> bytes:
        piece = os.read(descriptor, PIECE)
        if not piece:
            raise SandboxError(ENDED)
        return piece

    def _broken(self, output: OutputBuffer, files: int) -> str:
        limits = self._bwrap.limits
        memory, now = self._bwrap.used()
        if memory > limits.total_memory:
            return f"it was killed: it used more than {limits.total_memory} MB of memory"
        if now > max(limits.inodes, files):
            return f"it was killed: there are more than {limits.inodes:,} files"
        if output.total > FLOOD_BYTES:
            return f"it was killed: it wrote more than {FLOOD_BYTES >> 20} MB"
        return ""

    def _stop(self, output: OutputBuffer, tag: str, reason: str) -> CommandResult:
        """Kill what the shell runs; if the shell then does not go on, kill it too."""
        end = time.monotonic() + GRACE_S
        reply = None
        while reply is None and time.monotonic() < end:
            self._bwrap.clear(self._shell)
            self._bwrap.resume(self._shell)
            reply, _ = self._follow(output.add, (tag, self._shell_tag), min(end, time.monotonic() + CHECK_S / 5))
        if reply is None:
            self._end_shell()
        if reply is None or reply[0] != tag:
            return self._ended(output, reason)
        return self._frozen(output, None, reason)

    def _frozen(self, output: OutputBuffer, code: int | None, note: str = "") -> CommandResult:
        """The result of a command after which the shell lives, stopped and alone, if it is still the shell."""
        self._bwrap.clear(self._shell)
        self._drain(output.add)
        memory, _ = self._bwrap.used()
        broken = ""
        if image(self._shell) != self._image:
            broken = "the shell was replaced by another program, which was killed"
        elif memory > self._bwrap.limits.total_memory:
            broken = f"the shell was killed: it kept more than {self._bwrap.limits.total_memory} MB of memory"
        if not broken:
            return CommandResult(output.text(), code, note)
        self._end_shell()
        return self._ended(output, broken)

    def _ended(self, output: OutputBuffer, reason: str) -> CommandResult:
        self._shell = 0
        self._drain(output.add)
        note = f"{reason}; a new shell starts in {WORK}, without the old one's variables"
        return CommandResult(output.text(), None, note)


def _tag() -> str:
    return secrets.token_hex(8)


def _discard(piece: bytes) -> None:
    pass


def _printable(text: bytes | bytearray) -> str:
    return text.decode(errors="backslashreplace").translate(CONTROL)
