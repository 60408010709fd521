"""Foreign code that wants what is not its own. Imported by hosts, not by pytest."""

import json
import os
import subprocess
import sys
import tempfile
import time
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


class Greedy:
    """Takes as much as it can of what the action names."""

    def reset(self, seed: int) -> str:
        return "ready"

    def step(self, action: str) -> Any:
        getattr(self, action)()
        return "done", 1.0, True

    def close(self) -> None:
        pass

    def memory(self) -> None:
        self.held = bytearray(400 << 20)

    def memory_of_children(self) -> None:
        hold = "import time; held = bytearray(60 << 20); time.sleep(60)"
        for child in [subprocess.Popen([sys.executable, "-c", hold]) for _ in range(6)]:
            child.wait()

    def processes(self) -> None:
        for child in [subprocess.Popen(["sleep", "60"]) for _ in range(12)]:
            child.wait()

    def file(self) -> None:
        with tempfile.TemporaryFile() as file:
            for _ in range(64):
                file.write(bytes(1 << 20))

    def log(self) -> None:
        line = "x" * 1023
        for _ in range(24 << 10):
            print(line)
        time.sleep(2.5)  # two checks of the host
