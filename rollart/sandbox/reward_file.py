"""The reward that a program wrote to a file of its sandbox: a number, or a JSON object. Standard library only."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

from rollart.sandbox.shell import Sandbox

READ_S = 10.0


def read_reward(sandbox: Sandbox, *paths: str, key: str = "reward") -> dict[str, Any]:
    """From the first of `paths` that exists: the reward, and in `info` the other values. Without a file, or with one
    that has no such number, the reward is None, and `info["no_reward"]` is the reason."""
    for path in paths:
        found = sandbox.run(f"test -e {shlex.quote(path)} && cat {shlex.quote(path)}", READ_S)
        if found.exit_code == 0:
            return parse_reward(found.output, path, key)
    return {"reward": None, "info": {"no_reward": f"there is no {' or '.join(paths)}"}}


def parse_reward(text: str, path: str, key: str = "reward") -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    values = value if isinstance(value, dict) else {key: value}
    reward = values.pop(key, None)
    if not isinstance(reward, (bool, int, float)) or not math.isfinite(reward):
        return {"reward": None, "info": {"no_reward": f"{path} has no finite number as its {key}: {text[:100]!r}"}}
    success = values.pop("success", None)
    return {"reward": float(reward), "success": None if success is None else bool(success), "info": values}
