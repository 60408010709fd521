"""A Harbor task folder: instruction, environment and verifier."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.agents.harbor.container import container_image
from rollart.agents.harbor.image import Image, image_of

READ = ("task.toml", "instruction.md", "environment", "environment/Dockerfile", "tests", "tests/test.sh")
UNSUPPORTED = ("docker-compose.yaml", "docker-compose.yml")


@dataclass(frozen=True)
class HarborTask:
    """`agent_s` and `verifier_s` are their timeouts; `variables` are the verifier's."""

    folder: Path
    instruction: str
    image: Image
    agent_s: float
    verifier_s: float
    variables: dict[str, str]

    @property
    def name(self) -> str:
        return self.folder.name


def load(folder: Path, skip_run: bool = False, container: bool = False) -> HarborTask:
    """Raises ValueError if it cannot be played here, FileNotFoundError if it is incomplete, SandboxError if it needs a
    container and there is no engine."""
    _refuse_links(folder)
    about = tomllib.loads((folder / "task.toml").read_text())
    unknown = [name for name in UNSUPPORTED if (folder / "environment" / name).exists()]
    servers = ["mcp_servers"] if about.get("environment", {}).get("mcp_servers") else []
    for needed in [*unknown, *servers, *(["steps"] if about.get("steps") else [])]:
        raise ValueError(f"the Harbor task {folder} needs {needed}, which the sandbox does not have")
    if not (folder / "tests" / "test.sh").is_file():
        raise FileNotFoundError(f"the Harbor task {folder} has no tests/test.sh to verify it with")
    verifier = about.get("verifier", {})
    instruction = (folder / "instruction.md").read_text()
    texts, environment = mentions(folder), folder / "environment"
    return HarborTask(
        folder=folder,
        instruction=instruction,
        image=container_image(environment, texts) if container else image_of(environment, skip_run, texts),
        agent_s=_seconds(about, "agent"),
        verifier_s=_seconds(about, "verifier"),
        variables={name: str(value) for name, value in verifier.get("env", {}).items()},
    )


def mentions(folder: Path) -> list[str]:
    """The texts that name the folders which a trial may write to. Raises ValueError for links that lead elsewhere."""
    _refuse_links(folder)
    tests = [path.read_text(errors="replace") for path in sorted((folder / "tests").glob("*.*")) if _is_own_file(path)]
    return [(folder / "instruction.md").read_text(), *tests]


def _refuse_links(folder: Path) -> None:
    for name in READ:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"the Harbor task {folder} has {name} outside of its folder: a link must not lead there")


def _is_own_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _seconds(about: dict[str, Any], section: str) -> float:
    return float(about.get(section, {}).get("timeout_sec", 600.0))


def folders(path: Path) -> list[Path]:
    """The folder of a task, or all tasks in a folder, by name. Raises ValueError if there are none."""
    found = [path] if (path / "task.toml").is_file() else sorted(each.parent for each in path.glob("*/task.toml"))
    if not found:
        raise ValueError(f"{path} is neither a Harbor task nor a folder of them: there is no task.toml")
    return found
