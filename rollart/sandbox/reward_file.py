"""The reward that a program wrote to a file of its sandbox: a number, or a JSON object. Standard library only."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from typing import Any

from rollart.core.foreign import InvalidValue, parse_verdict
from rollart.sandbox.start import ShellSandbox

READ_S = 10.0


def read_reward(sandbox: ShellSandbox, *paths: str, key: str = "reward") -> dict[str, Any]:
    """From the first of `paths` that exists: the reward, and in `info` the other values. Without a file, or with one
    that has no such number, the reward is None, and `info["no_reward"]` is the reason."""
    for path in paths:
        found = sandbox.run(f"test -e {shlex.quote(path)} && cat {shlex.quote(path)}", READ_S)
        if found.exit_code == 0:
            return parse_reward(found.output, path, key)
    return {"reward": None, "info": {"no_reward": f"there is no {' or '.join(paths)}"}}


def parse_reward(text: str, path: str, key: str = "reward") -> dict[str, Any]:
    try:
        verdict = parse_verdict(json.loads(text), key)
        if verdict.reward is None:
            raise InvalidValue("there is none")
    except (ValueError, RecursionError) as error:
        why = f"{path} has no finite number as its {key} ({str(error)[:200]}): {text[:100]!r}"
        return {"reward": None, "info": {"no_reward": why}}
    return asdict(verdict)
