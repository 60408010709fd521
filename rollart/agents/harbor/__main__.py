"""`python -m rollart.agents.harbor FOLDER`: plays each task's own solution, and tells which rewards it gets here.

A task whose solution is not rewarded cannot be learnt in this sandbox, mostly because its tests need a network.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rollart.agents.harbor.task import HarborTask, folders, load
from rollart.agents.harbor.trial import played
from rollart.sandbox.archive import archive_paths
from rollart.sandbox.bubblewrap import SandboxError, SandboxLimits
from rollart.sandbox.shell import Sandbox


def solved(task: HarborTask, limits: SandboxLimits, key: str = "reward") -> dict[str, Any]:
    """What the verifier says of the task's own solution."""

    def solve(sandbox: Sandbox) -> dict[str, Any]:
        sandbox.unpack(archive_paths([(task.folder / "solution", "solution")]))
        sandbox.run(f"{task.image.enter} && bash /solution/solve.sh", task.agent_s)
        return {}

    return played(task, limits, solve, key)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rollart.agents.harbor", description=__doc__)
    parser.add_argument("folder", type=Path, help="a Harbor task, or a folder of them")
    parser.add_argument("--skip-run", action="store_true", help="do not run what the Dockerfiles would")
    parser.add_argument("--reward", default="reward", help="the name of the value to learn from")
    given = parser.parse_args()
    failed = 0
    for folder in folders(given.folder):
        try:
            found = solved(load(folder, given.skip_run), SandboxLimits(), given.reward)
            said = found["info"]["no_reward"] if found["reward"] is None else f"reward {found['reward']:g}"
            good = bool(found.get("success"))
        except (ValueError, OSError, SandboxError) as error:
            said, good = str(error), False
        failed += not good
        print(f"{'ok' if good else 'NOT OK':8}{folder.name}: {said}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
