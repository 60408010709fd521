"""Starts the sandbox that an image names: bubblewrap, a container, or one of a service. Standard library only."""

from __future__ import annotations

from typing import Protocol

from rollart.sandbox.bubblewrap import NO_MOUNTS, ExtraMounts, SandboxError, SandboxLimits
from rollart.sandbox.providers import is_remote
from rollart.sandbox.remote import RemoteSandbox
from rollart.sandbox.shell import DEFAULT_LIMITS, CommandResult, Sandbox


class ShellSandbox(Protocol):
    """A work folder and a shell in it. See `Sandbox` for the meaning of each."""

    def __enter__(self) -> ShellSandbox: ...
    def __exit__(self, *_: object) -> None: ...
    def run(self, command: str, deadline: float = 10.0) -> CommandResult: ...
    def unpack(self, archive: bytes, deadline: float = 20.0) -> bool: ...
    def pack(self, deadline: float = 20.0) -> bytes: ...
    def close(self) -> None: ...


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
