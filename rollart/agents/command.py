"""The driver of `agent: [command, ...]`: any program, in a sandbox of its own for each episode.

The usual environment variables point to the gateway, on the sandbox's own loopback; there is no other network.
ROLLART_EPISODE holds the episode as JSON. A reward may be written to the file that ROLLART_REWARD names.

Standard library only: the Python may be that of the agent's own environment, without rollart in it.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollart.core.endpoint import Endpoint
from rollart.sandbox.archive import archive_paths
from rollart.sandbox.bubblewrap import VARIABLES, WORK, ExtraMounts, SandboxLimits
from rollart.sandbox.port_forward import PortForward
from rollart.sandbox.reward_file import read_reward
from rollart.sandbox.shell import CommandResult, Sandbox

REWARD = f"{WORK}/.reward"
OUTPUT = 8000  # bytes of its output, for the log and for reward functions


class CommandAgent:
    """A driver: `run` plays one episode. Raises if the program's exit code is not 0."""

    def run(self, agent: dict[str, Any], endpoint: dict[str, Any], episode: dict[str, Any]) -> dict[str, Any]:
        limits, mounts = SandboxLimits(**agent["limits"]), ExtraMounts(folders=tuple(agent["mounts"]))
        files = archive_paths([(Path(agent["files"]), ".")]) if agent["files"] else b""
        with Sandbox(files, limits, OUTPUT, mounts, agent["image"]) as sandbox:
            variables = {"ROLLART_EPISODE": json.dumps(episode), "ROLLART_REWARD": REWARD}
            if agent["path"]:
                variables["PATH"] = ":".join([*agent["path"], VARIABLES["PATH"]])
            result = run(sandbox, agent["command"], Endpoint(**endpoint), variables, agent["deadline"])
            if result.exit_code != 0:
                raise RuntimeError(failure(agent["command"], result))
            verdict = read_reward(sandbox, REWARD)
        return dict(verdict, info={"output": result.output, **verdict["info"]})


def run(
    sandbox: Sandbox,
    command: list[str],
    endpoint: Endpoint,
    variables: dict[str, str],
    deadline: float,
    folder: str = WORK,
) -> CommandResult:
    """Raises SandboxError if the sandbox fails; how the program ended is in the result."""
    address = urlsplit(endpoint.url)
    assert address.hostname and address.port
    inside = replace(endpoint, url=f"http://127.0.0.1:{address.port}")
    environment = {**inside.environ(), "NO_PROXY": "*", **variables}
    assigned = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    line = f"cd {shlex.quote(folder)} && {' '.join(assigned)} {shlex.join(command)}"
    with PortForward(sandbox.processes[0], (address.hostname, address.port)):
        result = sandbox.run(line, deadline)
    if result.output:
        print(result.output, flush=True)  # for the log of agents
    return result


def failure(command: list[str], result: CommandResult) -> str:
    """The last line of its output, which names the cause most often, comes first."""
    ended = result.note or f"ended with exit code {result.exit_code}"
    end = result.output[-500:].strip()
    cause = f"{end.splitlines()[-1][:200]}: " if end else ""
    return f"{cause}`{shlex.join(command)}` {ended}; the end of its output: {end!r}"
