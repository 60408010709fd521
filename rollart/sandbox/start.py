"""Starts the sandbox that an image names: bubblewrap, a container, or one of a service. Standard library only."""

from __future__ import annotations

from typing import Protocol

from rollart.sandbox.bubblewrap import NO_MOUNTS, ExtraMounts, SandboxError, SandboxLimits
from rollart.sandbox.container import Container
from rollart.sandbox.providers import is_remote
from rollart.sandbox.remote import RemoteSandbox
from rollart.sandbox.shell import DEFAULT_LIMITS, SHELL, CommandResult, Sandbox


class ShellSandbox(Protocol):
    """A work folder and a shell in it. See `Sandbox` for the meaning of each."""

    def __enter__(self) -> ShellSandbox: ...
    def __exit__(self, *_: object) -> None: ...
    def run(self, command: str, deadline: float = 10.0) -> CommandResult: ...
    def unpack(self, archive: bytes, deadline: float = 20.0) -> bool: ...
    def pack(self, deadline: float = 20.0) -> bytes: ...
    def close(self) -> None: ...


class SandboxStarter:
    """Starts sandboxes of one kind, one after the other. A container takes long to start, so the next one is started
    ahead: at once, and again with each that is used. Those of services cost money, and bubblewrap needs no time."""

    def __init__(
        self,
        limits: SandboxLimits = DEFAULT_LIMITS,
        output: int = 4000,
        mounts: ExtraMounts = NO_MOUNTS,
        image: str | None = None,
    ) -> None:
        self._limits, self._output, self._mounts, self._image = limits, output, mounts, image
        self._spare: Container | None = None
        self._start_spare()

    def start(self, archive: bytes = b"") -> ShellSandbox:
        """Raises SandboxError."""
        spare, self._spare = self._spare, None
        try:
            if spare is None or self._image is None or not spare.is_running:
                return start_sandbox(archive, self._limits, self._output, self._mounts, self._image)
            return Sandbox(archive, self._limits, self._output, self._mounts, self._image, spare)
        finally:
            if spare is not None and not spare.is_running:
                spare.close()
            self._start_spare()

    def close(self) -> None:
        """End the one that is ahead."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()

    def _start_spare(self) -> None:
        if self._image and not is_remote(self._image):
            self._spare = Container(self._image, self._limits, SHELL, self._mounts)


def start_sandbox(
    archive: bytes = b"",
    limits: SandboxLimits = DEFAULT_LIMITS,
    output: int = 4000,
    mounts: ExtraMounts = NO_MOUNTS,
    image: str | None = None,
) -> ShellSandbox:
    """Raises SandboxError."""
    if image is None or not is_remote(image):
        return Sandbox(archive, limits, output, mounts, image)
    if mounts.folders or mounts.links:
        raise SandboxError(f"the sandbox {image} is on another machine: no folder of this one can be mounted in it")
    return RemoteSandbox(image, archive, limits, output)
