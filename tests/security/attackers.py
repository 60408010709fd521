"""Foreign code that wants what is not its own. Imported by hosts, not by pytest."""

import json
import os
import subprocess
import sys
from typing import Any


class Thief:
    """Shows all its variables, and those of a program that it starts."""

    def reset(self, seed: int) -> str:
        ours = subprocess.check_output(
            [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"], text=True
        )
        return json.dumps({**os.environ, **json.loads(ours)})

    def step(self, action: str) -> Any:
        return "", 0.0, True

    def close(self) -> None:
        pass


def stealing_player(env: Thief, rng: Any) -> str:
    return env.reset(0)


def stealing_reward(episode: Any) -> float:
    raise KeyError(json.dumps(dict(os.environ)))


def stealing_agent(endpoint: Any, episode: Any) -> dict[str, Any]:
    return {"reward": 0.0, "info": dict(os.environ)}
