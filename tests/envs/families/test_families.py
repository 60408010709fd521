"""Families: the catalogue, and virtual environments that are whole or not there."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollart.app import preflight
from rollart.app.cli import app
from rollart.core import foreign, llm_client
from rollart.core.errors import ConfigError, RollartError
from rollart.envs import families, tools
from rollart.envs.families import install

pytestmark = pytest.mark.slow

RUN = """\
model: {tiny: {}}
tasks:
  - name: game
    env: ENV
    family: FAMILY
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLART_ENVS", str(tmp_path / "envs"))
    return tmp_path / "envs"


def load(tmp_path: Path, env: str, family: str | None) -> str:
    """What is wrong with a run file."""
    path = tmp_path / "run.yaml"
    text = RUN.replace("ENV", env)
    path.write_text(text.replace("FAMILY", family) if family else text.replace("    family: FAMILY\n", ""))
    with pytest.raises(ConfigError) as error:
        preflight.load_run(path)
    return str(error.value)


def command(*arguments: str) -> tuple[int, str]:
    ended = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(app, ["envs", *arguments])
    return ended.exit_code, ended.output


def test_every_version_of_the_catalogue_is_exact() -> None:
    assert len(families.catalogue()) >= 8
    for family in families.catalogue().values():
        assert family.pythons and (family.tries or family.modules)
        for line in family.requirements.splitlines():
            assert re.fullmatch(r"[\w.-]+==[\w.]+", line), (family.name, line)


def test_adapters_import_nothing_but_their_package_and_the_standard_library() -> None:
    folder = Path(families.__file__).parent.parent / "adapters"
    packages = {"gymnasium", "numpy", "reasoning_gym", "textarena", "gem", "textworld", "alfworld", "bfcl_eval", "mcp"}
    packages |= {"gymnasium_robotics", "metaworld"}
    ours = ("rollart.envs.adapters", "rollart.envs.tools", "rollart.core.llm_client", "rollart.core.foreign")
    for path in (*folder.glob("*.py"), *(Path(str(module.__file__)) for module in (llm_client, foreign, tools))):
        for module in re.findall(r"^(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE):
            top = module.partition(".")[0]
            assert top in packages | sys.stdlib_module_names or module.startswith(ours), (path, module)


def test_a_missing_family_is_reported_with_the_command_that_installs_it(tmp_path: Path) -> None:
    env = "rollart.envs.adapters.textarena:TextArena"
    assert load(tmp_path, env, "textarena").endswith(
        "run.yaml:5: tasks.game.family 'textarena' is not installed; run: rollart envs add textarena"
    )
    assert "'textarina' is not known; did you mean 'textarena'?" in load(tmp_path, env, "textarina")
    with pytest.raises(ConfigError, match="run: rollart envs add gem"):
        families.python_of("gem")


def test_an_adapter_without_its_package_asks_for_the_family(tmp_path: Path) -> None:
    assert load(tmp_path, "rollart.envs.adapters.textarena:TextArena", None).endswith("`family: textarena`")
    assert "which module" in load(tmp_path, "rollart.envs.adapters.gymnasium:Gim", None)


def test_the_list_names_every_family_and_where_they_are(home: Path) -> None:
    code, text = command()
    assert code == 0 and str(home) in text.replace("\n", "")
    for name in families.catalogue():
        assert name in text


def test_a_family_that_needs_another_python_says_so() -> None:
    family = families.Family("old", "", "", pythons=("2.7",))
    with pytest.raises(RollartError, match=r"needs Python 2\.7.*--python /path/to/python2\.7"):
        install.add(family, print)
    with pytest.raises(RollartError, match=r"'old' runs on Python 2\.7; .* is 3\."):
        install.add(family, print, python=os.path.realpath(sys.executable))
    with pytest.raises(RollartError, match="cannot be run"):
        install.add(family, print, python="/no/such/python")


def test_names_that_are_taken_or_wrong_are_refused() -> None:
    for name, wanted in (("gem", "a family of rollart"), ("../x", "letters, digits")):
        with pytest.raises(ConfigError, match=wanted):
            families.choose(name, "")
    with pytest.raises(ConfigError, match="needs --requirements"):
        families.choose("mine", None)


def test_a_user_family_is_installed_listed_used_and_removed(home: Path, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("# nothing but Python\n")
    code, text = command("add", "mine", "-r", str(tmp_path / "requirements.txt"))
    assert code == 0 and "mine is installed: Python 3." in text
    assert "mine" in command()[1]
    python = command("python", "mine")[1].strip()
    where = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, timeout=60)
    assert where.stdout.strip() == str(home / "mine")
    before = (home / "mine").stat().st_ino
    command("add", "mine", "-r", str(tmp_path / "requirements.txt"))
    assert (home / "mine").stat().st_ino == before
    assert command("remove", "mine")[0] == 0
    assert not families.installed("mine") and command("remove", "mine")[0] == 2


def test_a_failed_installation_leaves_nothing_and_shows_why(home: Path) -> None:
    family = families.Family("bad", "", "./no-such-package\n", locked=False)
    with pytest.raises(RollartError, match=r"(?s)cannot be installed:.*no-such-package"):
        install.add(family, print)
    broken = families.Family("broken", "", "", modules=("no_such_module",))
    with pytest.raises(RollartError, match=r"(?s)does not work, so it was removed:.*no_such_module"):
        install.add(broken, print)
    assert [path.name for path in home.iterdir() if path.is_dir()] == []


def test_a_killed_installation_does_not_count_and_is_deleted_by_the_next(home: Path, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("")
    code = (
        "import os, signal\nfrom rollart.envs import families\nfrom rollart.envs.families import install\n"
        "def say(line):\n    if 'trying' in line: os.kill(os.getpid(), signal.SIGKILL)\n"
        "install.add(families.choose('mine', ''), say)"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert (home / ".mine-building").is_dir() and families.installed("mine") is None
    assert families.all_installed() == []
    install.add(families.choose("mine", ""), print)
    assert families.installed("mine") and not (home / ".mine-building").exists()


def test_two_cannot_work_on_a_family_at_once() -> None:
    with install._lock("mine"), pytest.raises(RollartError, match="another `rollart envs` is at work"):
        install.remove("mine")
