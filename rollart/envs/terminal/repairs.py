"""Problems with programs: make a failing test pass, rename a function, repair a script."""

from __future__ import annotations

import random

from rollart.envs.terminal.problem import Check, Problem, names, unchanged

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
