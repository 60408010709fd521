"""Harbor tasks in the images that their Dockerfiles describe, built and run by podman."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rollart.agents.harbor.__main__ import solved
from rollart.agents.harbor.container import build
from rollart.agents.harbor.task import load, mentions
from rollart.app import images
from rollart.app.cli import app
from rollart.config.loading import load as load_run
from rollart.sandbox.bubblewrap import SandboxLimits
from tests.support.podman import podman_image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
# RUN needs root, and the program that it makes is nowhere else.
DOCKERFILE = """\
FROM {image}
WORKDIR /app/src
COPY notes.txt /data/
ENV GREETING="good day"
RUN cp /bin/cat /bin/from_the_image && chmod a-w /data/notes.txt
"""
SOLVE = 'from_the_image /data/notes.txt > answer.txt; echo "$GREETING" >> /app/src/answer.txt\n'
TEST = """\
cd /app/src && grep -q hello answer.txt && grep -q "good day" answer.txt && from_the_image /tests/test.sh >/dev/null &&
  echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with podman_image(tmp_path_factory.mktemp("podman")) as name:
        yield name


@pytest.fixture
def task(tmp_path: Path, image: str) -> Path:
    folder = tmp_path / "task"
    for name, text in {
        "task.toml": 'version = "1.0"\n',
        "instruction.md": "Copy /data/notes.txt.",
        "environment/Dockerfile": DOCKERFILE.format(image=image),
        "environment/notes.txt": "hello\n",
        "solution/solve.sh": SOLVE,
        "tests/test.sh": TEST,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_from_and_run_are_honoured_and_the_solution_is_rewarded(task: Path) -> None:
    with pytest.raises(ValueError, match="is not built on this machine; `rollart envs images"):
        load(task, container=True)
    name = build(task / "environment", mentions(task))
    loaded = load(task, container=True)
    assert loaded.image.container == name and loaded.image.workdir == "/app/src"
    assert loaded.image.variables["GREETING"] == "good day"
    assert solved(loaded, SandboxLimits())["reward"] == 1
    (task / "environment" / "notes.txt").write_text("other\n")
    with pytest.raises(ValueError, match="is not built"):
        load(task, container=True)


def test_the_images_of_a_run_are_made_ready_by_one_command(task: Path, image: str, tmp_path: Path) -> None:
    (task / "environment" / "notes.txt").write_text("of this test\n")
    agent = {"name": "h", "agent": "rollart.agents.harbor:trial", "args": {"folder": str(task), "container": True}}
    shell = {"name": "s", "env": "rollart.envs.terminal:Terminal", "args": {"image": image}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"name": "r", "model": {"tiny": {}}, "tasks": [agent, shell]}))
    harbor, terminal = load_run(path).tasks
    assert "not on this machine; `rollart envs images RUN.yaml` pulls and builds" in images.missing(harbor)
    assert images.missing(terminal) == ""
    done = CliRunner().invoke(app, ["envs", "images", str(path)])
    assert done.exit_code == 0, done.output
    assert f"h: {task} made ready in" in done.output and f"s: {image} is here" in done.output
    assert images.missing(harbor) == ""
