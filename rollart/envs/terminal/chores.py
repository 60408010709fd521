"""Problems with text files: find, count, configure, restore, tidy. `level` 1 to 3: more files, more decoys."""

from __future__ import annotations

import random

from rollart.envs.terminal.problem import FOLDERS, LEVELS, Check, Problem, names, prose, tree, unchanged


def find(rng: random.Random, level: int) -> Problem:
    """Which file contains a word?"""
    (word,) = names(rng, 1)
    paths = tree(rng, 4 * level)
    files = {path: prose(rng, 2 * level, without=word) for path in paths}
    there = rng.choice(paths)
    lines = files[there].splitlines()
    lines.insert(rng.randint(0, len(lines)), f"the {word} is here")
    files[there] = "\n".join(lines) + "\n"
    return Problem(
        "find",
        f"Which file has the word {word}? Write its path to answer.txt",
        files,
        (f"grep -rlw {word} . > answer.txt",),
        (
            Check("answer", 'realpath -s --relative-to=/task "$(cat answer.txt)"', there),
            unchanged(files, there),
        ),
    )


def count(rng: random.Random, level: int) -> Problem:
    """How many lines of the logs have a level and, from level 2 on, a service?"""
    services = names(rng, 3)
    lines = {f"logs/{day}.log": _log(rng, services, 8 * level) for day in range(1, level + 2)}
    service, kind = rng.choice(services), rng.choice(LEVELS)
    pattern = f"{kind} {service}:" if level > 1 else f"{kind} "
    total = sum(pattern in line for text in lines.values() for line in text.splitlines())
    lines_of = f"{kind} lines of {service}" if level > 1 else f"{kind} lines"
    return Problem(
        "count",
        f"How many {lines_of} are in logs? Write the number to answer.txt",
        lines,
        (f"cat logs/* | grep -c '{pattern}' > answer.txt",),
        (Check("answer", "tr -d '[:space:]' < answer.txt", str(total)),),
    )


def config(rng: random.Random, level: int) -> Problem:
    """Set one key of a file of keys, and touch nothing else."""
    keys = names(rng, 3 * level)
    key = rng.choice(keys)
    old, new = rng.sample(range(10, 100), 2)
    values = {other: rng.randint(10, 99) for other in keys} | {key: old}
    lines = [f"{other}={value}" for other, value in values.items()]
    if level > 1:  # names that contain the name, and the same key in a comment
        lines += [f"{key}_max={rng.randint(10, 99)}", f"old_{key}={rng.randint(10, 99)}", f"# {key}={old}"]
        rng.shuffle(lines)
    after = [f"{key}={new}" if line == f"{key}={old}" else line for line in lines]
    files = {"app.conf": "\n".join(lines) + "\n"}
    return Problem(
        "config",
        f"Set {key} to {new} in app.conf",
        files,
        (f"sed -i s/^{key}=.*/{key}={new}/ app.conf",),
        (Check("app.conf", "cat app.conf", "\n".join(after) + "\n"),),
    )


def restore(rng: random.Random, level: int) -> Problem:
    """A file was spoilt by its last changes: put back the last version that the log calls good."""
    versions = 2 + level
    texts = {number: prose(rng, 2) for number in range(1, versions + 1)}
    good = rng.randint(1, versions - 1)
    log = "".join(
        f"{number} {'bad' if number > good else 'good'} {rng.choice(FOLDERS)}\n" for number in range(1, versions + 1)
    )
    files = {f"saved/{number}.txt": text for number, text in texts.items()}
    files |= {"saved/log": log, "page.txt": texts[versions]}
    return Problem(
        "restore",
        "page.txt was spoilt. saved has its versions, saved/log which are good. Put back the last good one",
        files,
        ("cat saved/log", f"cp saved/{good}.txt page.txt"),
        (Check("page.txt", "cat page.txt", texts[good]), unchanged(files, "saved/log")),
    )


def tidy(rng: random.Random, level: int) -> Problem:
    """Move all files of one ending into a folder."""
    ending, other = rng.sample(("tmp", "bak", "log", "old"), 2)
    stems = names(rng, 4 * level)
    (folder,) = names(rng, 1, without=tuple(stems))
    files = {f"{stem}.{rng.choice((ending, other))}": f"{stem}\n" for stem in stems[1:]} | {
        f"{stems[0]}.{ending}": "x\n"
    }
    after = sorted(f"./{folder}/{name}" if name.endswith(f".{ending}") else f"./{name}" for name in files)
    return Problem(
        "tidy",
        f"Move every .{ending} file into a new folder {folder}",
        files,
        (f"mkdir {folder} && mv *.{ending} {folder}",),
        (Check("files", "find . -type f | LC_ALL=C sort", "\n".join(after)),),
    )


def _log(rng: random.Random, services: list[str], lines: int) -> str:
    entries = (
        f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02} {rng.choice(LEVELS)} {rng.choice(services)}: took "
        f"{rng.randint(1, 99)} ms\n"
        for _ in range(lines)
    )
    return "".join(entries)
