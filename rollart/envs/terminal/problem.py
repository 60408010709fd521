"""A problem in a shell: files, the instruction, a scripted solution, checks; and what generated files are made of."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

WORDS = (
    *("amber", "badge", "cedar", "delta", "ember", "fable", "grape", "hazel", "igloo", "jewel", "kayak", "lemon"),
    *("maple", "noble", "olive", "pearl", "quail", "raven", "sable", "tulip", "umbra", "vivid", "wheat", "xenon"),
    *("yield", "zebra", "acorn", "birch", "coral", "daisy", "eagle", "frost", "ghost", "heron", "ivory", "jolly"),
)
FOLDERS = ("docs", "src", "data", "lib", "notes", "old", "tools", "etc")
LEVELS = ("INFO", "WARN", "ERROR", "DEBUG")


@dataclass(frozen=True)
class Check:
    """Passed if `command`, run in a new sandbox on a copy of the agent's folder, writes `expected`. The comparison is
    made outside, and the agent never sees either."""

    name: str
    command: str
    expected: str


@dataclass(frozen=True)
class Problem:
    kind: str
    text: str
    files: dict[str, str]
    solution: tuple[str, ...]
    checks: tuple[Check, ...]


Maker = Callable[[random.Random, int], Problem]


def belongs_to_held_out(problem: Problem) -> bool:
    """One problem in five, by its text and checks, is never trained. Other files do not count: the same problem among
    other files would be nearly the same."""
    content = repr((problem.kind, problem.text, problem.checks))
    return hashlib.sha256(content.encode()).digest()[0] % 5 == 0


def unchanged(files: dict[str, str], name: str) -> Check:
    return Check(f"{name} is left alone", f"cat {name}", files[name])


def names(rng: random.Random, count: int, without: tuple[str, ...] = ()) -> list[str]:
    return rng.sample([word for word in WORDS if word not in without], count)


def prose(rng: random.Random, lines: int, without: str = "") -> str:
    usable = [word for word in WORDS if word != without]
    return "".join(" ".join(rng.choices(usable, k=6)) + "\n" for _ in range(lines))


def tree(rng: random.Random, count: int) -> list[str]:
    """Paths of text files, spread over folders."""
    stems = rng.sample(WORDS, count)
    return [f"{rng.choice(FOLDERS)}/{stem}.txt" for stem in stems]
