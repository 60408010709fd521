"""How the environments of a task are run: by which Python, with which imports."""

from pathlib import Path

from rollart.config import TaskConfig
from rollart.envs import families
from rollart.workers.process import HostSpec

SHIM = "{rollart}/envs/slot_entry.py:EnvironmentShim"


def host_spec(task: TaskConfig, log: Path | None = None, python: str | None = None) -> HostSpec:
    """`python` is instead of the one of the task's family. Raises ConfigError if the family is not installed."""
    if python is None and task.family:
        python = families.python_of(task.family)
    # The shim comes first: it lets a Python that does not have rollart import our adapters.
    return HostSpec(SHIM, (SHIM, task.env), python=python, log=log, name=f"host of {task.name} environments")
