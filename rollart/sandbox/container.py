"""A sandbox in an OCI image, run by podman or docker: the same init as under bubblewrap, with the files of the image.

The invariants are those of `bubblewrap.py`, with these differences: `/` is the image, read-only; the container engine
makes the namespaces and removes the container when init ends, which it does at the end of its requests. The image needs
bash, tar and head. It must be there already: nothing is pulled while episodes wait.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from pathlib import Path

from rollart.sandbox.bubblewrap import (
    END_S,
    INIT,
    NO_MOUNTS,
    START_S,
    VARIABLES,
    WORK,
    Bubblewrap,
    ExtraMounts,
    SandboxError,
    SandboxLimits,
)

# How each mounts a work folder that belongs to the user in the sandbox, so that tar may set its times.
ENGINES = {
    "podman": "--mount=type=tmpfs,destination={work},tmpfs-size={size}m,U=true,exec=true",
    "docker": "--tmpfs={work}:size={size}m,mode=0777,exec,uid=1000,gid=1000",
}
INSPECT_S, ENGINE_S = 10.0, 60.0


def container_engine() -> str | None:
    """The first that is installed."""
    return next((found for name in ENGINES if (found := shutil.which(name))), None)


def run_engine(*arguments: str, seconds: float = ENGINE_S) -> str | None:
    """What the engine wrote; None if it failed. Raises SandboxError if there is none, or it does not answer."""
    engine = container_engine()
    if engine is None:
        raise SandboxError("neither podman nor docker is installed")
    try:
        done = subprocess.run([engine, *arguments], capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise SandboxError(f"`{engine} {' '.join(arguments)}` did not end within {seconds:g} s") from None
    return done.stdout if done.returncode == 0 else None


class Container(Bubblewrap):
    """As `Bubblewrap`, in `image`. It starts by itself; `wait` until it has."""

    def __init__(self, image: str, limits: SandboxLimits, shell: str, mounts: ExtraMounts = NO_MOUNTS) -> None:
        engine = container_engine()
        if engine is None:
            raise SandboxError(f"the image {image} needs podman or docker, and neither is installed")
        if mounts.links:
            raise SandboxError(f"the root of the image {image} is read-only: no links can be added to it")
        self._image = image
        self._engine = engine
        self._name = f"rollart-{os.getpid()}-{secrets.token_hex(6)}"
        super().__init__(limits, shell, mounts)

    def _start(self, shell: str) -> None:
        with contextlib.ExitStack() as theirs:
            stdin, self.requests = self._pipe(theirs, ours=1)
            self.replies, stdout = self._pipe(theirs, ours=0)
            self.output, stderr = self._pipe(theirs, ours=0)
            run = [self._engine, "run", *self._arguments(), self._image, *self._init(shell)]
            try:
                self._process = subprocess.Popen(
                    run, stdin=stdin, stdout=stdout, stderr=stderr, cwd="/", start_new_session=True
                )
            except OSError as error:
                raise SandboxError(f"{run[0]} cannot be started: {error}") from error
        for descriptor in (self.requests, self.replies, self.output):
            os.set_blocking(descriptor, False)

    @property
    def is_running(self) -> bool:
        """Also while it starts."""
        return self._process is not None and self._process.poll() is None

    def wait(self) -> None:
        self.init = self.init or self._wait_for_pid()

    def _arguments(self) -> list[str]:
        work = ENGINES[Path(self._engine).name].format(work=WORK, size=self.limits.disk)
        temporary = f"--tmpfs=/tmp:size={self.limits.disk}m,mode=1777,exec"
        variables = [f"--env={name}={value}" for name, value in VARIABLES.items() if name != "PATH"]
        folders = [f"--volume={path}:{path}:ro" for path in self._mounts.folders]
        return [
            *("--rm", "--interactive", "--pull=never", "--network=none", f"--name={self._name}", "--log-driver=none"),
            *("--user=1000:1000", "--cap-drop=all", "--security-opt=no-new-privileges", "--read-only"),
            *(work, temporary, f"--workdir={WORK}", "--hostname=sandbox"),
            *(f"--ulimit=nofile={self.limits.open_files}", f"--ulimit=nproc={self.limits.processes}"),
            *("--entrypoint=", *variables, *folders),
        ]

    def _init(self, shell: str) -> list[str]:
        limits = self.limits
        init = INIT.format(
            memory=limits.memory * 1024,
            processes=limits.processes,
            file=limits.disk * 1024,
            files=limits.open_files,
            cpu=limits.cpu_s,
        )
        return ["bash", "--norc", "--noprofile", "-c", init, "init", shell]

    def _wait_for_pid(self) -> int:
        """The engine reports it once the container runs."""
        deadline = time.monotonic() + START_S
        asked = [self._engine, "inspect", "--format", "{{.State.Pid}}", self._name]
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                raise SandboxError(f"{self._engine} could not run the image {self._image}: {self._last_output()}")
            found = subprocess.run(asked, capture_output=True, text=True, timeout=INSPECT_S, check=False).stdout.strip()
            if found.isdecimal() and int(found) > 0:
                return int(found)
            time.sleep(0.05)
        raise SandboxError(f"the image {self._image} did not start within {START_S:g} s")

    def close(self) -> None:
        """End everything in it. The engine removes what is left of the container."""
        process, self._process = self._process, None
        if process is not None and self.init:
            self.kill(self.init)
        super().close()
        if process is None:
            return
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            remove = [self._engine, "rm", "--force", self._name]
            subprocess.run(remove, capture_output=True, timeout=END_S, check=False)
            process.kill()
            process.wait(END_S)
