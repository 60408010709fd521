"""What a shell task is: the files the agent finds, what is asked, a scripted solution, and the checks afterwards."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass


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
    """One task in five, by what it asks and checks, is never trained. Files that only surround it do not count: the
    same task in other surroundings would be nearly the same."""
    content = repr((problem.kind, problem.text, problem.checks))
    return hashlib.sha256(content.encode()).digest()[0] % 5 == 0


def unchanged(files: dict[str, str], name: str) -> Check:
    return Check(f"{name} is left alone", f"cat {name}", files[name])
