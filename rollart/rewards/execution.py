"""A reward for programs: runs the code of the last action in the sandbox, on inputs whose outputs are known.

The expected output is compared outside and never enters the sandbox, so a program cannot look it up, and one that ends
early, or forges a verdict, only fails its case. A sandbox failure is an error, never a reward of 0.
"""

import re

from rollart.core.types import Episode, RewardResult
from rollart.sandbox.archive import archive
from rollart.sandbox.shell import Sandbox

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
CASE_S = 5.0
MARGIN = 1000  # characters beyond the longest expected output, before the rest is cut off


def code_in(action: str) -> str:
    """The last fenced block, or the whole action."""
    blocks = FENCED.findall(action)
    return blocks[-1] if blocks else action


def program_output(episode: Episode, *, seconds: float = CASE_S) -> RewardResult:
    """The share of `info["cases"]`, pairs of input and expected output, that the program gets right in `seconds` each.
    Whitespace at the ends of lines and of the output is ignored."""
    cases = [(str(stdin), str(expected)) for stdin, expected in episode.info["cases"]]
    if not cases:
        raise ValueError('info["cases"] is empty: there is nothing to test the program with')
    files = {"program.py": code_in(episode.turns[-1].action)}
    files |= {f"{number}.in": stdin for number, (stdin, _) in enumerate(cases)}
    longest = max(len(expected) for _, expected in cases) + MARGIN
    with Sandbox(archive(files), output=longest) as sandbox:
        right = sum(_passed(sandbox, number, expected, seconds) for number, (_, expected) in enumerate(cases))
    share = right / len(cases)
    return RewardResult(share, parts={"passed": right, "cases": len(cases)}, success=right == len(cases))


def _passed(sandbox: Sandbox, number: int, expected: str, seconds: float) -> bool:
    result = sandbox.run(f"python3 -I program.py < {number}.in 2>/dev/null", seconds)
    return result.exit_code == 0 and _lines(result.output) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
