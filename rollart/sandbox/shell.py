"""A sandbox with one bash in it that lives from command to command. Standard library only, Python 3.9 or later.

The invariants:
- One command runs at a time, within its deadline and the limits; one that breaks them is killed with all it started.
- What a command leaves in the background is killed when the command ends: between commands nothing runs.
- Variables, functions and the current folder survive as long as the shell does. When it ends, by itself or because
  killing its children was not enough, the next command gets a new one and the files are still there.
- The end of a command, and of the shell, is told on a pipe of its own, with a tag that is new each time. A command
  that forges it only ends its own turn early.
- Whatever a command does is answered by a Result. SandboxError means that the sandbox broke.
"""

from __future__ import annotations

import os
import re
import secrets
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from rollart.sandbox.bubble import NO_EXTRAS, WORK, Bubble, Extras, Limits, SandboxError
from rollart.sandbox.output import Output

SHELL = """\
exec 9>&2 2>/dev/null
while IFS= read -r __tag && IFS= read -r -d '' __command; do
  jobs >/dev/null
  eval "$__command" </dev/null >&9 2>&9
  printf '%s %d\\n' "$__tag" "$?"
done
"""
USUAL = Limits()
LOOK_S = 0.1  # between two looks at memory and files
START_S = 20.0
GRACE_S = 1.0  # for the shell to go on once its children are killed
COMMAND_BYTES = 32_000
FLOOD_BYTES = 64 * 2**20
LINE_BYTES = 4096
PIECE = 65536
CODE = re.compile(r"[0-9]{1,3}")


@dataclass(frozen=True)
class Result:
    """`exit_code` is None if the command was killed or ended the shell; `note` says so in a sentence."""

    output: str
    exit_code: int | None
    note: str = ""


class WorkTooBig(Exception):
    """What is in the work folder cannot be taken out."""


class Sandbox:
    """Starts at once, with `archive` (a tar) unpacked in the work folder. Raises SandboxError."""

    def __init__(
        self, archive: bytes = b"", limits: Limits = USUAL, output: int = 4000, extras: Extras = NO_EXTRAS
    ) -> None:
        self._output = output
        self._line = b""
        self._shell, self._shell_tag = 0, ""
        self._bubble = Bubble(limits, SHELL, extras)
        try:
            if archive and not self.unpack(archive):
                raise SandboxError("the files could not be put into the sandbox: they are too many or too big")
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
        """The ids on this machine of all that runs inside, the keeper first."""
        return [self._bubble.keeper, *self._bubble.processes()]

    def run(self, command: str, deadline: float = 10.0) -> Result:
        """Raises SandboxError."""
        text = command.encode(errors="replace").replace(b"\0", b"")
        if len(text) > COMMAND_BYTES:
            return Result("", None, f"the command has {len(text):,} bytes, more than {COMMAND_BYTES:,}; it was not run")
        if not self._shell:
            self._start_shell()
        tag, output = _tag(), Output(self._output)
        end = time.monotonic() + deadline
        _, files = self._bubble.used()
        self._bubble.ask(f"{tag}\n".encode() + text + b"\0", end + GRACE_S)
        answer, broken = self._follow(output.add, (tag, self._shell_tag), end, lambda: self._broken(output, files))
        if answer is None:
            return self._stop(output, tag, broken or f"it was killed: it ran for more than {deadline:g} s")
        if answer[0] != tag:
            return self._ended(output, f"the shell ended with exit code {answer[1]}")
        self._bubble.clear(self._shell)
        self._drain(output.add)
        return Result(output.text(), answer[1])

    def unpack(self, archive: bytes, deadline: float = 20.0) -> bool:
        """Put the files of a tar into the work folder; False if they do not fit. Raises SandboxError."""
        self._end_shell()
        tag, end = _tag(), time.monotonic() + deadline
        self._bubble.ask(f"\nunpack {tag} {len(archive)}\n".encode() + archive, end)
        answer, _ = self._follow(_forget, (tag,), end)
        if answer is None:
            raise SandboxError(f"the files were not put into the sandbox within {deadline:g} s")
        return answer[1] == 0

    def pack(self, deadline: float = 20.0) -> bytes:
        """The work folder as a tar. The shell ends. Raises WorkTooBig or SandboxError."""
        self._end_shell()
        limit = 2 * self._bubble.limits.disk * 2**20
        pieces: list[bytes] = []
        size = 0

        def keep(piece: bytes) -> None:
            nonlocal size
            size += len(piece)
            if size <= limit:
                pieces.append(piece)

        tag, end = _tag(), time.monotonic() + deadline
        self._bubble.ask(f"\npack {tag}\n".encode(), end)
        answer, _ = self._follow(keep, (tag,), end, lambda: "too big" if size > limit else "")
        if answer is None or answer[1] != 0 or size > limit:
            for pid in self._bubble.processes():
                self._bubble.kill(pid)
            raise WorkTooBig("the work folder cannot be packed: it is too big, or parts of it cannot be read")
        return b"".join(pieces)

    def close(self) -> None:
        self._bubble.close()

    def _start_shell(self) -> None:
        self._drain(_forget)
        ready, ended, end = _tag(), _tag(), time.monotonic() + START_S
        # The empty line ends what an earlier shell may have left unread; the first command does nothing.
        self._bubble.ask(f"\nshell {ended}\n{ready}\n:\0".encode(), end)
        said = Output(1000)
        answer, _ = self._follow(said.add, (ready, ended), end)
        alive = self._bubble.processes()
        if answer is None or answer[0] != ready or len(alive) != 1:
            raise SandboxError(f"no shell could be started in the sandbox: {said.text()}")
        self._shell, self._shell_tag = alive[0], ended

    def _end_shell(self) -> None:
        if self._shell:
            self._bubble.kill(self._shell)
            self._shell = 0
            if self._follow(_forget, (self._shell_tag,), time.monotonic() + START_S)[0] is None:
                raise SandboxError("the shell in the sandbox was killed, but its end was not told")

    def _follow(
        self, keep: Callable[[bytes], None], tags: tuple[str, ...], end: float, broken: Callable[[], str] = lambda: ""
    ) -> tuple[tuple[str, int] | None, str]:
        """Read until one of `tags` is told, with its code: the answer. Without one, what was broken, or nothing if it
        was the time that ended."""
        bubble, look = self._bubble, time.monotonic() + LOOK_S
        while True:
            now = time.monotonic()
            if now >= look:
                look = now + LOOK_S
                if reason := broken():
                    return None, reason
            if now >= end:
                return None, ""
            ready, _, _ = select.select([bubble.answers, bubble.output], [], [], max(0.0, min(look, end) - now))
            if bubble.output in ready:
                keep(self._read(bubble.output))
            if bubble.answers in ready and (answer := self._answer(tags)):
                self._drain(keep)
                return answer, ""

    def _answer(self, tags: tuple[str, ...]) -> tuple[str, int] | None:
        """The next answer, if it is there. Other lines are old, or somebody's who plays with the pipe."""
        *lines, rest = (self._line + self._read(self._bubble.answers)).split(b"\n")
        self._line = rest[-LINE_BYTES:]
        for line in lines:
            tag, _, code = line.decode(errors="replace").partition(" ")
            if tag in tags and CODE.fullmatch(code):
                return tag, int(code)
        return None

    def _drain(self, keep: Callable[[bytes], None]) -> None:
        """What was written before an answer is in the pipe by then; no more than a pipe holds."""
        for _ in range(16):
            if not select.select([self._bubble.output], [], [], 0)[0]:
                return
            keep(self._read(self._bubble.output))

    def _read(self, descriptor: int) -> bytes:
        piece = os.read(descriptor, PIECE)
        if not piece:
            raise SandboxError("the sandbox ended; it may have been killed because the machine was short of memory")
        return piece

    def _broken(self, output: Output, files: int) -> str:
        limits = self._bubble.limits
        memory, now = self._bubble.used()
        if memory > limits.total_memory:
            return f"it was killed: it took more than {limits.total_memory} MB of memory"
        if now > max(limits.inodes, files):
            return f"it was killed: there are more than {limits.inodes:,} files"
        if output.total > FLOOD_BYTES:
            return f"it was killed: it wrote more than {FLOOD_BYTES >> 20} MB"
        return ""

    def _stop(self, output: Output, tag: str, reason: str) -> Result:
        """Kill what the shell runs; if it then does not go on, the shell too."""
        end = time.monotonic() + GRACE_S
        answer = None
        while answer is None and time.monotonic() < end:
            self._bubble.clear(self._shell)
            answer, _ = self._follow(output.add, (tag, self._shell_tag), min(end, time.monotonic() + LOOK_S / 5))
        if answer is None:
            self._end_shell()
        if answer is None or answer[0] != tag:
            return self._ended(output, reason)
        self._bubble.clear(self._shell)
        self._drain(output.add)
        return Result(output.text(), None, reason)

    def _ended(self, output: Output, reason: str) -> Result:
        self._shell = 0
        self._drain(output.add)
        return Result(output.text(), None, f"{reason}; there is a new shell in {WORK}, without the old one's variables")


def _tag() -> str:
    return secrets.token_hex(8)


def _forget(piece: bytes) -> None:
    pass
