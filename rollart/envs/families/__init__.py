"""Families: virtual environments for packages that conflict with each other, or with ours.

A family is a folder with a Python of its own, made by `rollart envs add NAME`. The catalogue lists the known ones, each
with a lock file of exact versions; a user may add others from a requirements file.
"""

import json
import os
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rollart.config.yaml_tree import did_you_mean
from rollart.core.errors import ConfigError

HERE = Path(__file__).parent
RECORD = "family.json"


@dataclass(frozen=True, slots=True)
class FamilyTrial:
    """An environment that tests a family with one turn of an episode."""

    env: str
    args: dict[str, Any]
    action: str = "x"


@dataclass(frozen=True, slots=True)
class Family:
    """It runs on the versions `pythons`, best first; empty: any. `tries` are what it is tested with."""

    name: str
    offers: str
    requirements: str
    pythons: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    tries: tuple[FamilyTrial, ...] = ()
    agents: tuple[str, ...] = ()  # our `module:function` that need it
    locked: bool = True  # the requirements are complete: nothing to resolve

    @property
    def adapters(self) -> list[str]:
        return [target.partition(":")[0] for target in (*(trial.env for trial in self.tries), *self.agents)]


@dataclass(frozen=True, slots=True)
class InstalledFamily:
    name: str
    folder: Path
    version: str
    requirements: str

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> list[str]:
        """Folders of its modules."""
        return [str(path) for path in sorted((self.folder / "lib").glob("python3*/site-packages"))]

    @property
    def mounts(self) -> list[str]:
        """The folders that a sandbox must mount to run its Python: its own, and that of the base Python. Raises
        ConfigError if that folder has more in it than a Python."""
        base, home = self.python.resolve().parent.parent, Path.home().resolve()
        if base in (home, home / ".local", *home.parents):
            raise ConfigError(
                f"the family {self.name!r} uses {self.python.resolve()}, and a sandbox would have to show all of "
                f"{base} to run it; use a Python in a folder of its own: "
                f"rollart envs add {self.name} --again --python PATH"
            )
        return [str(self.folder), *([] if base == Path("/usr") else [str(base)])]

    @property
    def megabytes(self) -> float:
        return sum(path.lstat().st_size for path in self.folder.rglob("*")) / 1e6


@cache
def catalogue() -> dict[str, Family]:
    listed = tomllib.loads((HERE / "catalogue.toml").read_text())
    return {
        name: Family(
            name=name,
            offers=about["offers"],
            requirements=(HERE / f"{name}.txt").read_text(),
            pythons=tuple(about["pythons"]),
            modules=tuple(about.get("modules", ())),
            agents=tuple(about.get("agents", ())),
            tries=tuple(FamilyTrial(**{"args": {}, **trial}) for trial in about.get("tries", ())),
        )
        for name, about in listed.items()
    }


def choose(name: str, requirements: str | None) -> Family:
    """A family of the catalogue, or the user's own with these requirements. Raises ConfigError."""
    known = catalogue().get(name)
    if requirements is None:
        if known is None:
            raise ConfigError(f"the family {problem(name)}; your own needs --requirements FILE")
        return known
    if known is not None:
        raise ConfigError(f"{name!r} is a family of rollart; choose another name for your own")
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ConfigError(f"a family's name is letters, digits, - and _, not {name!r}")
    return Family(name, "your own", requirements, locked=False)


def root() -> Path:
    """Where families are: ROLLART_ENVS, or the user's data folder."""
    if chosen := os.environ.get("ROLLART_ENVS"):
        return Path(chosen).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "rollart" / "envs"


def installed(name: str) -> InstalledFamily | None:
    """None unless it is there and complete."""
    folder = root() / name
    try:
        record = json.loads((folder / RECORD).read_text())
    except OSError:
        return None
    found = InstalledFamily(name, folder, record["version"], record["requirements"])
    return found if os.access(found.python, os.X_OK) else None


def all_installed() -> list[InstalledFamily]:
    names = sorted(path.parent.name for path in root().glob(f"[!.]*/{RECORD}"))
    return [family for name in names if (family := installed(name))]


def family_of(target: str) -> str | None:
    """The family that one of our adapters needs, by its `module:name`."""
    module = target.partition(":")[0]
    return next((name for name, family in catalogue().items() if module in family.adapters), None)


def problem(name: str) -> str | None:
    """Why the family cannot be used, as the end of a sentence, or None."""
    if installed(name):
        return None
    if name in catalogue():
        return f"{name!r} is not installed; run: rollart envs add {name}"
    near = did_you_mean(name, sorted({*catalogue(), *(family.name for family in all_installed())}))
    return f"{name!r} is not known{near}; `rollart envs` lists them"


def python_of(name: str) -> str:
    """The interpreter of a family. Raises ConfigError."""
    found = installed(name)
    if found is None:
        raise ConfigError(f"the family {problem(name)}")
    return str(found.python)
