"""Was the task done? Found out in a sandbox of its own, on a copy of the agent's folder.

No process, alias or trick of the agent is there, its files are, and the checks arrive only now. What they should write
is compared here, outside, so a program of the agent's that a check runs cannot read what would satisfy it.
"""

from __future__ import annotations

from rollart.envs.terminal.problem import Problem
from rollart.sandbox.bubble import Limits
from rollart.sandbox.shell import Sandbox, WorkTooBig


def verify(problem: Problem, agent: Sandbox, limits: Limits, deadline: float) -> dict[str, bool]:
    """Which checks passed. Ends the agent's sandbox. Raises SandboxError if no other can be had."""
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
