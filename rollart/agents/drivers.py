"""How the agent of a task is run: which class plays an episode in the forked process, and its arguments.

A driver is a class for the forking host, standard library only, with one method:

    def run(self, agent, endpoint: dict, episode: dict) -> dict

`agent` is the task's agent, as JSON; `endpoint` and `episode` are the fields of `Endpoint` and `AgentEpisode`. It
returns `reward`, `success` and `info`, all optional, and raises if the program fails.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.config import AgentConfig, TaskConfig
from rollart.core.errors import ConfigError
from rollart.envs import families
from rollart.workers.host import ENVIRONMENT
from rollart.workers.host_handle import HostSpec

FUNCTION = "{rollart}/agents/function.py:FunctionAgent"
COMMAND = "{rollart}/agents/command.py:CommandAgent"
MAX_COMMAND_S = 86_400.0  # the episode's own deadline comes first


@dataclass(frozen=True, slots=True)
class Driver:
    """`imports` are loaded once, in the host, before episodes are forked."""

    target: str
    agent: Any
    imports: tuple[str, ...] = ()


def driver_of(task: TaskConfig) -> Driver:
    if task.agent is None:
        raise ConfigError(f"task {task.name!r} has no agent")
    if task.agent.function is not None:
        return Driver(FUNCTION, task.agent.function, (task.agent.function,))
    return Driver(COMMAND, command_of(task, task.agent))


def command_of(task: TaskConfig, agent: AgentConfig) -> dict[str, Any]:
    """The arguments of `CommandAgent`. If the task has a family, its Python is first in PATH."""
    family = families.installed(task.family) if task.family else None
    return {
        "command": agent.command,
        "files": None if agent.files is None else str(agent.files.absolute()),
        "mounts": [str(path.absolute()) for path in agent.mounts] + (family.mounts if family else []),
        "path": [str(family.python.parent)] if family else [],
        "limits": agent.limits,
        "deadline": agent.deadline or MAX_COMMAND_S,
    }


def host_spec(task: TaskConfig, log: Path | None = None) -> HostSpec:
    """Raises ConfigError if the task's family is not installed."""
    driver = driver_of(task)
    return HostSpec(
        driver.target,
        (ENVIRONMENT, driver.target, *driver.imports),  # the first lets any Python import our modules
        python=families.python_of(task.family) if task.family else None,
        log=log,
        name=f"host of {task.name} agents",
    )
