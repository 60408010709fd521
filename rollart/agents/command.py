"""The driver of `agent: [command, ...]`: any program, in a sandbox of its own for each episode.

It finds the gateway where the usual variables say, on the sandbox's own loopback; there is no other network. The
episode is in ROLLART_EPISODE, as JSON. A reward may be written to the file that ROLLART_REWARD names.

Standard library only: the Python may be that of the agent's own environment, without rollart in it.
"""

from __future__ import annotations

import io
import json
import shlex
import tarfile
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from rollart.agents.endpoint import Endpoint  # our package is lent by what the host imports first
from rollart.sandbox.archive import OWNER
from rollart.sandbox.bubble import VARIABLES, WORK, Extras, Limits
from rollart.sandbox.door import Door
from rollart.sandbox.shell import Sandbox
from rollart.sandbox.verdict import verdict

REWARD = f"{WORK}/.reward"
OUTPUT = 8000  # bytes of what it wrote, for the log and for reward functions


class CommandAgent:
    """A driver: `run` plays one episode. It raises if the program ends with another exit code than 0."""

    def run(self, agent: dict[str, Any], endpoint: dict[str, Any], episode: dict[str, Any]) -> dict[str, Any]:
        limits, extras = Limits(**agent["limits"]), Extras(seen=tuple(agent["see"]))
        with Sandbox(packed(agent["files"]), limits, OUTPUT, extras) as sandbox:
            variables = {"ROLLART_EPISODE": json.dumps(episode), "ROLLART_REWARD": REWARD}
            if agent["path"]:
                variables["PATH"] = ":".join([*agent["path"], VARIABLES["PATH"]])
            result = run(sandbox, agent["command"], Endpoint(**endpoint), variables, agent["deadline"])
            found = verdict(sandbox, REWARD)
        return dict(found, info={**result, **found["info"]})


def run(
    sandbox: Sandbox,
    command: list[str],
    endpoint: Endpoint,
    variables: dict[str, str],
    deadline: float,
    folder: str = WORK,
) -> dict[str, Any]:
    """The program's `output`. Raises RuntimeError if it fails, SandboxError if the sandbox does."""
    address = urlsplit(endpoint.url)
    assert address.hostname and address.port
    inside = replace(endpoint, url=f"http://127.0.0.1:{address.port}")
    given = {**inside.environ(), "NO_PROXY": "*", **variables}
    assigned = [f"{name}={shlex.quote(value)}" for name, value in given.items()]
    line = f"cd {shlex.quote(folder)} && {' '.join(assigned)} {shlex.join(command)}"
    with Door(sandbox.processes[0], (address.hostname, address.port)):
        result = sandbox.run(line, deadline)
    if result.output:
        print(result.output, flush=True)  # for the log of agents
    if result.exit_code != 0:
        ended = result.note or f"ended with exit code {result.exit_code}"
        raise RuntimeError(f"`{shlex.join(command)}` {ended}; the last it wrote: {result.output[-500:].strip()!r}")
    return {"output": result.output}


def packed(folder: str | None, place: str = ".") -> bytes:
    """A folder as a tar, for `place` in the work folder."""
    if folder is None:
        return b""

    def theirs(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = OWNER
        return entry

    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        tar.add(folder, place, filter=theirs)
    return made.getvalue()
