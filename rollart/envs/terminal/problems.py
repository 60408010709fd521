"""Problems in a shell: with text files (find, count, configure, restore, tidy) and with programs (make a failing test
pass, rename a function, repair a script). `level` 1 to 3: more files, more decoys, more mistakes."""

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
# What a function of `values` should return, and what it returns by mistake.
FAULTS = (
    ("max(values) - min(values)", "max(values) + min(values)"),
    ("sum(values) / len(values)", "sum(values) / (len(values) - 1)"),
    ("sorted(values)[-2]", "sorted(values)[1]"),
    ("sum(v * v for v in values)", "sum(v + v for v in values)"),
    ("len(set(values))", "len(values)"),
    ("values[-1] - values[0]", "values[0] - values[-1]"),
    ("[v for v in values if v % 2]", "[v for v in values if v]"),
    ("sum(values[::2])", "sum(values[1::2])"),
    ("values.index(max(values))", "values.index(min(values))"),
    ("sum(v for v in values if v > 5)", "sum(v for v in values if v < 5)"),
)


@dataclass(frozen=True)
class Check:
    """Passed if `command`, run in a new sandbox on a copy of the agent's folder, writes `expected`. The comparison is
    made outside, and the agent never sees either."""

    name: str
    command: str
    expected: str


@dataclass(frozen=True)
class Problem:
    """`files` and the instruction `text`, a scripted `solution`, and the checks of the result."""

    kind: str
    text: str
    files: dict[str, str]
    solution: tuple[str, ...]
    checks: tuple[Check, ...]


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
        (Check("answer", 'realpath -s --relative-to=/task "$(cat answer.txt)"', there), unchanged(files, there)),
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
    log = "".join(f"{number} {'bad' if number > good else 'good'} {rng.choice(FOLDERS)}\n" for number in texts)
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
    files = {f"{stem}.{rng.choice((ending, other))}": f"{stem}\n" for stem in stems[1:]}
    files[f"{stems[0]}.{ending}"] = "x\n"
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


def test(rng: random.Random, level: int) -> Problem:
    """A package with a failing test. The checks try more inputs than the test has."""
    package, *functions = names(rng, 1 + 2 * level)
    right, wrong = rng.choice(FAULTS)
    faulty = rng.choice(functions)
    others = [fault for fault, _ in FAULTS if fault != right]
    bodies = {name: rng.choice(others) for name in functions} | {faulty: wrong}
    tried = _revealing(rng, right, wrong, 4)
    expected = [_value(right, values) for values in tried]
    core = f"{package}/core.py"
    files = {
        f"{package}/__init__.py": "",
        core: "\n\n".join(f"def {name}(values):\n    return {body}\n" for name, body in bodies.items()),
        "test.py": f"from {package}.core import {faulty}\n\nfound = {faulty}({tried[0]})\n"
        f"assert found == {expected[0]!r}, f'{faulty} gave {{found}}, not {expected[0]!r}'\nprint('ok')\n",
    }
    call = f"from {package}.core import {faulty} as f; print([f(v) for v in {tried}])"
    return Problem(
        "test",
        f"python3 test.py fails. Repair {core}",
        files,
        ("python3 test.py", f"grep -A 1 'def {faulty}' {core}", _replace(faulty, wrong, right, core)),
        (Check("more numbers", f'python3 -c "{call}"', repr(expected)), unchanged(files, "test.py")),
    )


def rename(rng: random.Random, level: int) -> Problem:
    """Rename a function wherever it is used, but not the names that only contain its name."""
    old, new, *others = names(rng, 2 + 2 * level)
    module = {"lib.py": f"def {old}(x):\n    return x + 1\n\n\ndef {old}_twice(x):\n    return {old}({old}(x))\n"}
    users = {
        f"{name}.py": f"from lib import {old}, {old}_twice\n\nprint({old}({rng.randint(1, 9)}), {old}_twice(2))\n"
        for name in others
    }
    files = module | users
    after = {name: text.replace(f"{old}(", f"{new}(").replace(f"{old},", f"{new},") for name, text in files.items()}
    return Problem(
        "rename",
        f"Rename the function {old} to {new} in all files, but not {old}_twice",
        files,
        (f"sed -i 's/\\b{old}\\b/{new}/g' *.py",),
        tuple(Check(name, f"cat {name}", text) for name, text in sorted(after.items())),
    )


def script(rng: random.Random, level: int) -> Problem:
    """A shell script with `level` mistakes. The checks run it with other arguments."""
    name, variable = names(rng, 2)
    right = [
        "#!/bin/bash",
        f"{variable}=0",
        'for number in "$@"; do',
        f'  if [ "$number" -gt {(limit := rng.randint(2, 6))} ]; then',
        f"    {variable}=$(({variable} + number))",
        "  fi",
        "done",
        f'echo "{name} ${variable}"',
    ]
    mistakes = (
        (2, "for number in $1; do"),
        (3, right[3].replace("-gt", "-lt")),
        (4, right[4].replace(" + ", " - ")),
        (5, "  done"),
        (7, right[7].replace(f"${variable}", "$number")),
    )
    wrong = dict(sorted(rng.sample(mistakes, level)))
    lines = [wrong.get(at, line) for at, line in enumerate(right)]
    runs = [_numbers(rng) for _ in range(level + 2)]

    def expected(numbers: list[int]) -> str:
        return f"{name} {sum(number for number in numbers if number > limit)}"

    def call(numbers: list[int]) -> str:
        return f"bash {name}.sh {' '.join(map(str, numbers))}"

    return Problem(
        "script",
        f"Repair {name}.sh: it should add up its arguments above {limit}. See README",
        {f"{name}.sh": "\n".join(lines) + "\n", "README": f"{call(runs[0])}\nshould say\n{expected(runs[0])}\n"},
        (f"cat {name}.sh", *(f"sed -i '{at + 1}c\\{right[at]}' {name}.sh" for at in wrong)),
        tuple(Check(f"run {n}", call(numbers), expected(numbers)) for n, numbers in enumerate(runs)),
    )


def _numbers(rng: random.Random) -> list[int]:
    """Includes one of 7 to 9 and one above 20, so that no other sum equals that of the large ones."""
    return [*rng.sample(range(1, 7), 3), rng.randint(7, 9), rng.randint(20, 40)]


def _revealing(rng: random.Random, right: str, wrong: str, count: int) -> list[list[int]]:
    """Inputs for which the results differ."""
    found: list[list[int]] = []
    while len(found) < count:
        values = rng.choices(range(1, 30), k=5)
        if _value(right, values) != _value(wrong, values):
            found.append(values)
    return found


def _value(expression: str, values: list[int]) -> object:
    return eval(expression, {"values": values})


def _replace(function: str, wrong: str, right: str, file: str) -> str:
    """A sed command for that function only: others may have the same text."""

    def plain(text: str) -> str:
        return "".join("\\" + letter if letter in r"[]*/.&" else letter for letter in text)

    return f"sed -i '/def {function}(/,/return/s/{plain(wrong)}$/{plain(right)}/' {file}"


KINDS: dict[str, Callable[[random.Random, int], Problem]] = {
    maker.__name__: maker for maker in (find, count, config, restore, tidy, test, rename, script)
}
