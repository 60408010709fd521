"""`python -m rollart.agents.harbor FOLDER`: plays each task's own solution and prints its reward.

A task whose solution is not rewarded cannot be learnt in this sandbox, usually because its tests need a network.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rollart.agents.harbor.container import build
from rollart.agents.harbor.task import HarborTask, folders, load, mentions
from rollart.agents.harbor.trial import play_and_verify
from rollart.sandbox.archive import archive_paths
from rollart.sandbox.bubblewrap import SandboxError, SandboxLimits
from rollart.sandbox.shell import Sandbox


def solved(task: HarborTask, limits: SandboxLimits, key: str = "reward") -> dict[str, Any]:
    """The verifier's reward for the task's own solution."""

    def solve(sandbox: Sandbox) -> dict[str, Any]:
        sandbox.unpack(archive_paths([(task.folder / "solution", "solution")]))
        sandbox.run(f"{task.image.enter} && bash /solution/solve.sh", task.agent_s)
        return {}

    return play_and_verify(task, limits, solve, key)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rollart.agents.harbor", description=__doc__)
    parser.add_argument("folder", type=Path, help="a Harbor task, or a folder of them")
    parser.add_argument("--skip-run", action="store_true", help="do not run what the Dockerfiles would")
    parser.add_argument("--container", action="store_true", help="build the Dockerfiles, and play in their images")
    parser.add_argument("--reward", default="reward", help="the name of the value to learn from")
    options = parser.parse_args()
    failed = 0
    for folder in folders(options.folder):
        try:
            if options.container:
                build(folder / "environment", mentions(folder))
            task = load(folder, options.skip_run, options.container)
            verdict = solved(task, SandboxLimits(), options.reward)
            line = verdict["info"]["no_reward"] if verdict["reward"] is None else f"reward {verdict['reward']:g}"
            good = bool(verdict.get("success"))
        except (ValueError, OSError, SandboxError) as error:
            line, good = str(error), False
        failed += not good
        print(f"{'ok' if good else 'NOT OK':8}{folder.name}: {line}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
