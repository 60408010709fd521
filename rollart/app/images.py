"""The OCI images that the tasks of a run need on every machine where their environments or agents run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollart.agents.harbor import container as harbor
from rollart.agents.harbor.task import folders, mentions
from rollart.config import TaskConfig
from rollart.sandbox.bubblewrap import SandboxError
from rollart.sandbox.container import container_engine, run_engine
from rollart.sandbox.providers import is_remote

HARBOR, TERMINAL = "rollart.agents.harbor", "rollart.envs.terminal"
PULL_S = 1800.0


@dataclass(frozen=True)
class NeededImage:
    """`what` is an image, or a folder whose Dockerfile is built. `is_here` and `get` raise SandboxError."""

    task: str
    what: str
    is_here: Callable[[], bool]
    get: Callable[[], object]


def image_of(task: TaskConfig) -> str | None:
    """That of the terminal environment, or of a program that is an agent."""
    if task.agent is not None:
        return task.agent.image
    return task.env_args.get("image") if (task.env or "").startswith(TERMINAL) else None


def needed(task: TaskConfig) -> Iterator[NeededImage]:
    """None for sandboxes of services. Raises ValueError for a Harbor folder that cannot be read."""
    image = image_of(task)
    if image and not is_remote(image):
        yield NeededImage(task.name, image, lambda: _is_here(image), lambda: _pull(image))
    function = task.agent.function if task.agent is not None else None
    if function and function.partition(":")[0].startswith(HARBOR) and task.env_args.get("container"):
        for folder in folders(Path(task.env_args["folder"])):
            yield _built(task.name, folder)


def missing(task: TaskConfig) -> str:
    """What is not on this machine, as the rest of a sentence; empty if all is here."""
    try:
        wanted = list(needed(task))
        if wanted and container_engine() is None:
            return f"needs the image {wanted[0].what}, which needs podman or docker"
        absent = [image.what for image in wanted if not image.is_here()]
    except (SandboxError, ValueError, OSError) as error:
        return f"needs images, and {error}"
    if not absent:
        return ""
    more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
    return f"needs the image {absent[0]}{more}, not on this machine; `rollart envs images RUN.yaml` pulls and builds"


def _built(task: str, folder: Path) -> NeededImage:
    environment, texts = folder / "environment", mentions(folder)
    return NeededImage(
        task, str(folder), lambda: harbor.is_built(environment, texts), lambda: harbor.build(environment, texts)
    )


def _is_here(image: str) -> bool:
    return run_engine("image", "inspect", "--format", "{{.Id}}", image) is not None


def _pull(image: str) -> None:
    if run_engine("pull", "--quiet", image, seconds=PULL_S) is None:
        raise SandboxError(f"the image {image} could not be pulled; `{container_engine()} pull {image}` shows why")
