"""A reward for programs: the policy's Python runs with the tests of the episode, in a sandbox without network.

Program and tests share an interpreter, as such tests expect, so a program that searches its own process for the way to
report success can find it. Look at programs that pass before you trust the curve.
"""

import re
import secrets

from rollart.core.types import Episode, RewardResult
from rollart.rewards.answers import last_text
from rollart.sandbox.archive import archive
from rollart.sandbox.bubblewrap import SandboxLimits
from rollart.sandbox.shell import Sandbox

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def passes_tests(
    episode: Episode, *, tests: str | None = None, deadline: float = 10.0, memory: int = 512
) -> RewardResult:
    """1 if the program, followed by the tests, ends without an error. The tests are the column `tests`, by default the
    answer: text, or a list of statements. `memory` is in MB."""
    given = episode.info["answer"] if tests is None else episode.info["row"][tests]
    checks = "\n".join(map(str, given)) if isinstance(given, list) else str(given)
    passed = secrets.token_hex(8)  # a program that ends early, whatever its exit code, does not print it
    script = f"{program(last_text(episode))}\n{checks}\nprint('', {passed!r}, sep='\\n')\n"
    limits = SandboxLimits(memory=memory, total_memory=2 * memory, cpu_s=max(1, round(deadline)))
    with Sandbox(archive({"check.py": script}), limits) as sandbox:
        result = sandbox.run("python3 -s check.py", deadline)
    success = result.exit_code == 0 and result.output.rstrip().endswith(passed)
    return RewardResult(float(success), success=success)


def program(text: str) -> str:
    """The last block of Python, or all of it."""
    blocks = BLOCK.findall(text)
    return (blocks[-1] if blocks else text).strip()
