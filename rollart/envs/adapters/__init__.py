"""Adapters for environments of other packages: one thin file each.

They run in the Python of the package's own family: from 3.9 on, with the standard library and that package only.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any


def instance(seed: int, held_out: bool) -> int:
    """The seed for a package that has no held-out instances: even numbers train, odd ones evaluate. It seeds the global
    generators too, for packages that ignore their seed."""
    number = 2 * seed + held_out
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)
    return number


class CommandGame:
    """A game of text commands. With `commands` each observation ends with the commands that would work."""

    reusable = True
    commands: bool
    env: Any = None
    state: Any = None

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
            self.env = None

    def _text(self, text: str) -> str:
        listed = f"\n\nYou can: {', '.join(self.state.admissible_commands)}" if self.commands else ""
        return text.strip() + listed


def cache_folder(name: str) -> Path:
    """For what is slow to generate; safe to delete."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "rollart" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
