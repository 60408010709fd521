"""A sandbox that a service runs elsewhere, with the methods of `Sandbox`. Standard library only, Python 3.9 or later.

The invariants of `shell.py` hold, with these differences, because each command is a program of its own there:
- Variables, functions and the current folder are saved after a command and restored before the next; options of the
  shell and aliases are not.
- What a command leaves in the background is killed with its process group; a process that left the group lives until
  the sandbox is deleted.
- Memory, CPU time, open files and the size of a file are limited per process. All together have what the service gives
  the sandbox; the size of the work folder is checked when files are moved.
- The image needs bash, tar, base64 and coreutils, and a user who may create the work folder, directly or by sudo.
"""

from __future__ import annotations

import base64
import re
import secrets
import sys
import time

from rollart.sandbox.bubblewrap import VARIABLES, WORK, SandboxError, SandboxLimits
from rollart.sandbox.providers import LIFETIME_S, provider
from rollart.sandbox.shell import COMMAND_BYTES, DEFAULT_LIMITS, CommandResult, OutputBuffer, WorkTooBig

START_S = 30.0
# Arguments: its folder, a tag, the deadline, the bytes of output, the command in base64.
RUN = """\
state=$1 tag=$2 half=$(($4 / 2))
printf %s "$5" | base64 -d > "$state/command"
rm -f "$state/code"
timeout -s KILL "$3" bash --norc --noprofile "$state/shell" "$state" </dev/null > "$state/output" 2>&1 &
group=$!
wait $group 2>/dev/null
ended=$?
kill -KILL -- -$group 2>/dev/null
size=$(wc -c < "$state/output")
if [ -e "$state/code" ]; then mv "$state/next" "$state/variables"; else rm -f "$state/variables"; fi
printf '%s %d %d %s\\n' "$tag" "$ended" "$size" "$(cat "$state/code" 2>/dev/null || echo none)"
if [ "$size" -le "$4" ]; then base64 -w 0 < "$state/output"
else { head -c $half "$state/output"; tail -c $half "$state/output"; } | base64 -w 0; fi
"""
# Runs the command in bash, and saves what the next one needs. Read-only variables are not saved, and these are.
SHELL = """\
ulimit -v {memory} -f {file} -n {files} -t {cpu}
declare -r __rollart_state=$1
set --
BASH_ARGV0=bash  # the name in its error messages
cd {work}
if [ -e "$__rollart_state/variables" ]; then source "$__rollart_state/variables" 2>/dev/null; fi
eval "$(cat "$__rollart_state/command")"
declare -r __rollart_code=$?
{{ declare -p | grep -v '^declare -[a-zA-Z]*r'; declare -f; printf 'cd %q\\n' "$PWD"; }} > "$__rollart_state/next"
printf %d "$__rollart_code" > "$__rollart_state/code"
"""
# Arguments: the folder, the file to unpack, megabytes of disk.
UNPACK = f"""\
rm -f "$1/variables"
tar -x -f "$2" -C {WORK} && [ "$(du -s -m {WORK} | cut -f 1)" -le "$3" ]
echo "unpacked $?"
rm -f "$2"
"""
PACK = f"""\
rm -f "$1/variables"
tar -c -f "$2" -C {WORK} . && [ "$(du -s -m "$2" | cut -f 1)" -le "$3" ]
echo "packed $?"
"""
SETUP = f"""\
set -e
mkdir -p "$1"
if ! mkdir -p {WORK} 2>/dev/null; then sudo -n mkdir -p {WORK}; fi
if [ ! -w {WORK} ]; then sudo -n chown "$(id -u)" {WORK}; fi
{{scripts}}
echo ready
"""
REPORT = re.compile(r"(\d+) (\d+) (\d+|none)\n([A-Za-z0-9+/=]*)\s*")


class RemoteSandbox:
    """`image` is `e2b://TEMPLATE` or `daytona://SNAPSHOT`. Raises SandboxError."""

    def __init__(
        self, image: str, archive: bytes = b"", limits: SandboxLimits = DEFAULT_LIMITS, output: int = 4000
    ) -> None:
        self._output, self._limits = output, limits
        self._state = f"/tmp/.rollart-{secrets.token_hex(6)}"
        self._image = image
        self._provider = provider(image)
        try:
            self._provider.create()
            self._set_up()
            if archive and not self.unpack(archive):
                raise SandboxError("the files could not be unpacked in the sandbox: they are too many or too big")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RemoteSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, command: str, deadline: float = 10.0) -> CommandResult:
        """Raises SandboxError."""
        text = command.encode(errors="replace").replace(b"\0", b"")
        if len(text) > COMMAND_BYTES:
            note = f"the command has {len(text):,} bytes, more than {COMMAND_BYTES:,}; it was not run"
            return CommandResult("", None, note)
        tag, began = secrets.token_hex(8), time.monotonic()
        arguments = [self._state, tag, f"{deadline:g}", str(self._output), base64.b64encode(text).decode()]
        reported = self._execute("run", arguments, deadline)
        found = REPORT.fullmatch(reported.partition(f"{tag} ")[2])
        if found is None:
            raise SandboxError(f"the sandbox {self._image} did not report the end of a command: {reported[:200]!r}")
        ended, size, code, encoded = found.groups()
        output = OutputBuffer(self._output)
        output.add(base64.b64decode(encoded))
        output.total = int(size)
        if code != "none":
            return CommandResult(output.text(), int(code))
        killed = int(ended) == 137 and time.monotonic() - began >= deadline
        reason = f"it was killed: it ran for more than {deadline:g} s" if killed else _shell_ended(int(ended))
        note = f"{reason}; a new shell starts in {WORK}, without the old one's variables"
        return CommandResult(output.text(), None, note)

    def unpack(self, archive: bytes, deadline: float = 20.0) -> bool:
        """Put the files of a tar into the work folder; False if they do not fit. Raises SandboxError."""
        self._provider.upload(f"{self._state}/upload", archive)
        arguments = [self._state, f"{self._state}/upload", str(self._limits.disk)]
        return "unpacked 0" in self._execute("unpack", arguments, deadline)

    def pack(self, deadline: float = 20.0) -> bytes:
        """The work folder as a tar. Variables are lost. Raises WorkTooBig or SandboxError."""
        arguments = [self._state, f"{self._state}/packed", str(2 * self._limits.disk)]
        if "packed 0" not in self._execute("pack", arguments, deadline):
            raise WorkTooBig("the work folder cannot be packed: it is too big, or parts of it cannot be read")
        return self._provider.download(f"{self._state}/packed")

    def close(self) -> None:
        try:
            self._provider.delete()
        except SandboxError as error:
            hours = LIFETIME_S / 3600
            print(f"a sandbox was not deleted and ends by itself in {hours:g} h: {error}", file=sys.stderr, flush=True)

    def _set_up(self) -> None:
        limits = self._limits
        shell = SHELL.format(
            memory=limits.memory * 1024, file=limits.disk * 1024, files=limits.open_files, cpu=limits.cpu_s, work=WORK
        )
        names = [f"export {name}={value}" for name, value in VARIABLES.items() if name != "PATH"]
        scripts = {"run": "\n".join([*names, RUN]), "unpack": UNPACK, "pack": PACK, "shell": shell}
        lines = [f'printf %s {_encoded(text)} | base64 -d > "$1/{name}"' for name, text in scripts.items()]
        command = f"printf %s {_encoded(SETUP.format(scripts=chr(10).join(lines)))} | base64 -d | bash -s {self._state}"
        said = self._provider.execute(["/bin/bash", "-c", command], START_S)
        if not said.endswith("ready\n"):
            raise SandboxError(
                f"the image {self._image} cannot be used: it needs bash, tar, base64 and coreutils, and a user who may "
                f"create {WORK}; it wrote {said[:200]!r}"
            )

    def _execute(self, script: str, arguments: list[str], seconds: float) -> str:
        return self._provider.execute(["/bin/bash", f"{self._state}/{script}", *arguments], seconds)


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _shell_ended(code: int) -> str:
    return f"the shell ended with exit code {code}"
