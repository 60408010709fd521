"""What an agent leaves for the verifier of its Harbor task, and what a task folder wants of the host."""

import shutil
import sys
from pathlib import Path

import pytest

from rollart.agents.harbor.image import image_of
from rollart.agents.harbor.task import load
from rollart.agents.harbor.trial import play_and_verify
from rollart.core.errors import ConfigError
from rollart.envs.families import InstalledFamily
from rollart.sandbox.bubblewrap import SandboxLimits
from tests.agents.test_harbor import doing, made

sandboxed = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
HONEST = "mkdir -p /logs/verifier; {} ; [ -e /logs/verifier/reward.txt ] || echo 0 > /logs/verifier/reward.txt"
CHEAT = "echo 1 > /logs/verifier/reward.txt"
SITE = """
site=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $site
echo 'import os; os.system("mkdir -p /logs/verifier; {cheat}")' > $site/x.pth
"""


@pytest.mark.slow
@sandboxed
@pytest.mark.parametrize(
    ("left", "verifier"),
    [
        (SITE.format(cheat=CHEAT), "python3 -c pass"),
        (f"echo '{CHEAT}' > ~/.bash_profile", "bash -lc true"),
        (f"echo '{CHEAT}' > ~/.bashrc", "bash -ic true"),
    ],
    ids=["user site", "profile", "bashrc"],
)
def test_what_an_agent_left_in_its_home_is_not_run_by_the_verifier(tmp_path: Path, left: str, verifier: str) -> None:
    task = load(made(tmp_path, HONEST.format(verifier)))
    assert play_and_verify(task, SandboxLimits(), doing(left))["reward"] == 0


@pytest.mark.slow
@sandboxed
def test_the_verifier_still_finds_what_the_agent_was_asked_to_leave_in_its_home(tmp_path: Path) -> None:
    task = load(made(tmp_path, HONEST.format(f"grep -q 42 ~/answer.txt && {CHEAT}")))
    assert play_and_verify(task, SandboxLimits(), doing("echo 42 > ~/answer.txt"))["reward"] == 1


@pytest.mark.parametrize("source", ["../..", "../../secret.txt", "link/secret.txt", "notes/../../../secret.txt"])
def test_a_dockerfile_copies_nothing_from_outside_its_folder(tmp_path: Path, source: str) -> None:
    (tmp_path / "secret.txt").write_text("a key of the host")
    folder = made(tmp_path, "true", f"FROM scratch\nCOPY {source} /app/\n")
    (folder / "environment" / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=f"copies {source}, which is not in"):
        image_of(folder / "environment")


def test_an_instruction_cannot_be_a_link_to_a_file_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("a key of the host")
    folder = made(tmp_path, "true")
    (folder / "instruction.md").unlink()
    (folder / "instruction.md").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ValueError, match=r"has instruction.md outside of its folder"):
        load(folder)


@pytest.mark.parametrize("prefix", [".", ".local"])
def test_a_python_in_the_home_folder_does_not_make_the_home_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    base, family = tmp_path / prefix / "bin" / "python3", tmp_path / "families" / "f"
    for folder in (base.parent, family / "bin"):
        folder.mkdir(parents=True)
    shutil.copy(sys.executable, base)
    (family / "bin" / "python").symlink_to(base)
    with pytest.raises(ConfigError, match="a sandbox would have to show all of"):
        _ = InstalledFamily("f", family, "3.11", "").mounts
