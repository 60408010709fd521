"""What generated files are made of."""

from __future__ import annotations

import random

WORDS = (
    *("amber", "badge", "cedar", "delta", "ember", "fable", "grape", "hazel", "igloo", "jewel", "kayak", "lemon"),
    *("maple", "noble", "olive", "pearl", "quail", "raven", "sable", "tulip", "umbra", "vivid", "wheat", "xenon"),
    *("yield", "zebra", "acorn", "birch", "coral", "daisy", "eagle", "frost", "ghost", "heron", "ivory", "jolly"),
)
FOLDERS = ("docs", "src", "data", "lib", "notes", "old", "tools", "etc")
LEVELS = ("INFO", "WARN", "ERROR", "DEBUG")


def names(rng: random.Random, count: int, without: tuple[str, ...] = ()) -> list[str]:
    return rng.sample([word for word in WORDS if word not in without], count)


def prose(rng: random.Random, lines: int, without: str = "") -> str:
    usable = [word for word in WORDS if word != without]
    return "".join(" ".join(rng.choices(usable, k=6)) + "\n" for _ in range(lines))


def tree(rng: random.Random, count: int) -> list[str]:
    """Paths of text files, spread over folders."""
    stems = rng.sample(WORDS, count)
    return [f"{rng.choice(FOLDERS)}/{stem}.txt" for stem in stems]
