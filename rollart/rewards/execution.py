"""A reward for programs: the code in the last action is run in the sandbox, on inputs whose outputs are known.

What the program should print is compared out here and never enters the sandbox, so a program cannot look it up, and one
that ends early, or forges a verdict, has only failed its case. A sandbox that breaks is an error, never a reward of 0.
"""

import re

from rollart.core.types import Episode, RewardResult
from rollart.sandbox.archive import archive
from rollart.sandbox.shell import Sandbox

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
CASE_S = 5.0
MARGIN = 1000  # characters that a wrong output may be longer before it is cut


def code_in(action: str) -> str:
    """The last fenced block, or all of it."""
    blocks = FENCED.findall(action)
    return blocks[-1] if blocks else action


def program_output(episode: Episode, *, seconds: float = CASE_S) -> RewardResult:
    """The share of `info["cases"]`, pairs of an input and the output wanted, that the program gets right in `seconds`
    each. Space at the ends of lines and of the output does not count."""
    cases = [(str(given), str(wanted)) for given, wanted in episode.info["cases"]]
    if not cases:
        raise ValueError('info["cases"] is empty: there is nothing to judge the program by')
    files = {"program.py": code_in(episode.turns[-1].action)}
    files |= {f"{number}.in": given for number, (given, _) in enumerate(cases)}
    longest = max(len(wanted) for _, wanted in cases) + MARGIN
    with Sandbox(archive(files), output=longest) as sandbox:
        right = sum(_passed(sandbox, number, wanted, seconds) for number, (_, wanted) in enumerate(cases))
    share = right / len(cases)
    return RewardResult(share, parts={"passed": right, "cases": len(cases)}, success=right == len(cases))


def _passed(sandbox: Sandbox, number: int, wanted: str, seconds: float) -> bool:
    result = sandbox.run(f"python3 -I program.py < {number}.in 2>/dev/null", seconds)
    return result.exit_code == 0 and _lines(result.output) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
