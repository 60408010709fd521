"""A shell and a problem to solve in it: each action is a command, each observation its output. Nearly all prefill.

Standard library only, Python 3.9 or later: it runs in a worker process. Needs bubblewrap; without it no episode starts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollart.envs.terminal.problems import KINDS, Problem, belongs_to_held_out
from rollart.sandbox.archive import archive
from rollart.sandbox.bubblewrap import SandboxLimits
from rollart.sandbox.shell import CommandResult, Sandbox, WorkTooBig
from rollart.sandbox.start import SandboxStarter, ShellSandbox

RULES = (
    "You have a bash shell in a folder of your own. Answer with one command at a time, as plain text or in a ```bash "
    "block; you then see what it wrote and its exit code. Say `done` when the task is done. You have {turns} turns, "
    "and {seconds:g} seconds for each command. There is no network, and nothing runs on after its command.\n\n"
)
BLOCK = re.compile(r"```[ \t]*(?:bash|shell|sh|console)?[ \t]*\n(.*?)(?:\n[ \t]*)?```", re.DOTALL)
OVER = re.compile(r"[\s`.!]*(?:done|submit)[\s`.!]*", re.IGNORECASE)
IDLE = ("ls", "pwd", "cat *", "done")  # commands of the unskilled player
PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
DRAWS = 10_000


class Terminal:
    """1 if all checks of the problem pass at the end, otherwise 0; `info["checks"]` has each. `kinds` are equally
    likely; `output` is in bytes, `limits` are fields of `rollart.sandbox.bubblewrap.SandboxLimits`."""

    reusable = True  # a reset uses a new sandbox

    def __init__(
        self,
        *,
        kinds: Sequence[str] = tuple(KINDS),
        difficulty: int = 1,
        turns: int = 10,
        deadline: float = 10.0,
        output: int = 4000,
        rules: bool = True,
        limits: dict[str, int] | None = None,
        image: str | None = None,
        held_out: bool = False,
    ) -> None:
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown or not kinds:
            raise ValueError(f"Terminal has no kind {unknown[:1] or kinds}; the kinds are {', '.join(KINDS)}")
        if "test" in kinds and image is None and not any(Path(python).exists() for python in PYTHONS):
            paths = " or ".join(PYTHONS)
            raise ValueError(f"the kind `test` needs a Python in the sandbox, at {paths}; install python3")
        if difficulty not in (1, 2, 3):
            raise ValueError("Terminal needs a difficulty of 1, 2 or 3")
        self.kinds, self.difficulty, self.turns, self.deadline = tuple(kinds), difficulty, turns, deadline
        self.output, self.rules, self.held_out = output, rules, held_out
        self.limits, self.image = SandboxLimits(**(limits or {})), image
        self.problem: Problem | None = None
        self.history: list[str] = []
        self._sandbox: ShellSandbox | None = None
        self._starter = SandboxStarter(self.limits, output, image=image)

    def reset(self, seed: int) -> str:
        self._end_sandbox()
        self.problem, self.history = self._draw(seed), []
        self._sandbox = self._starter.start(archive(self.problem.files))
        rules = RULES.format(turns=self.turns, seconds=self.deadline) if self.rules else ""
        return rules + self.problem.text

    def step(self, action: str) -> dict[str, Any]:
        if self._sandbox is None:
            raise RuntimeError("the episode is over; reset first")
        command = parse(action)
        self.history.append(command or "done")
        if not command:
            return self._over("", truncated=False)
        shown = observation(self._sandbox.run(command, self.deadline))
        if len(self.history) >= self.turns:
            return self._over(shown, truncated=True)
        return {"messages": shown, "reward": 0.0, "done": False}

    def close(self) -> None:
        self._end_sandbox()
        self._starter.close()

    def _end_sandbox(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()

    def _draw(self, seed: int) -> Problem:
        rng = random.Random(f"terminal {seed}")  # a stream of its own
        for _ in range(DRAWS):
            problem = KINDS[rng.choice(self.kinds)](rng, self.difficulty)
            if belongs_to_held_out(problem) == self.held_out:
                return problem
        raise ValueError("no problem was drawn; allow more `kinds`")

    def _over(self, shown: str, truncated: bool) -> dict[str, Any]:
        assert self.problem is not None and self._sandbox is not None
        sandbox, self._sandbox = self._sandbox, None
        checks = verify(self.problem, sandbox, self.limits, self.deadline)
        success = all(checks.values())
        info = {"success": success, "kind": self.problem.kind, "checks": checks}
        return {"messages": shown or [], "reward": float(success), "done": True, "truncated": truncated, "info": info}


def parse(action: str) -> str:
    """The command: the first block of code, otherwise the whole text. Empty: the agent is done."""
    if OVER.fullmatch(action):
        return ""
    block = BLOCK.search(action)
    command = (block.group(1) if block else action).strip()
    return "" if OVER.fullmatch(command) else command or ":"


def observation(result: CommandResult) -> str:
    output = result.output
    if output and not output.endswith("\n"):
        output += "\n"
    return f"{output}[{result.note}]" if result.note else f"{output}[exit {result.exit_code}]"


def verify(problem: Problem, agent: ShellSandbox, limits: SandboxLimits, deadline: float) -> dict[str, bool]:
    """Which checks passed. Ends the agent's sandbox. Raises SandboxError.

    They run in a sandbox of their own, on a copy of the agent's folder: no process or alias of the agent is there, and
    the checks arrive only now. What they should write is compared here, outside, so a program of the agent that a check
    runs cannot read what would satisfy it."""
    failed = {check.name: False for check in problem.checks}
    try:
        work = agent.pack()
    except WorkTooBig:
        return failed
    finally:
        agent.close()
    with Sandbox(limits=limits, output=100_000) as sandbox:
        if not sandbox.unpack(work):
            return failed
        return {check.name: _passes(sandbox, check.command, check.expected, deadline) for check in problem.checks}


def _passes(sandbox: Sandbox, command: str, expected: str, deadline: float) -> bool:
    result = sandbox.run(command, deadline)
    return result.exit_code == 0 and result.output.strip() == expected.strip()


def player(env: Terminal, rng: random.Random, *, skill: float) -> str:
    """With probability `skill` the next command of the scripted solution, otherwise one that does not help."""
    assert env.problem is not None
    if rng.random() >= skill:
        return rng.choice(IDLE)
    return next((command for command in env.problem.solution if command not in env.history), "done")
