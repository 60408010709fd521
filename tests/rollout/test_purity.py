"""The control plane imports no torch, no Ray, no HTTP, no threads and no wall clock, so that it can be simulated."""

import json
import subprocess
import sys
from pathlib import Path

import rollart.rollout

FORBIDDEN = {
    "torch", "ray", "aiohttp", "starlette", "uvicorn", "websockets", "transformers", "numpy", "requests", "http.client"
}  # fmt: skip
PACKAGE = Path(rollart.rollout.__file__).parent


def test_importing_the_control_plane_loads_nothing_heavy() -> None:
    modules = [f"rollart.rollout.{path.stem}" for path in PACKAGE.glob("*.py") if path.stem != "__init__"]
    script = f"import sys, json, {', '.join(modules)}; print(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(json.loads(answer.stdout))
    assert not loaded & FORBIDDEN
    assert {"rollart.rollout.scheduler", "rollart.rollout.training_loop"} <= loaded


def test_the_control_plane_uses_neither_threads_nor_the_wall_clock() -> None:
    for path in PACKAGE.glob("*.py"):
        text = path.read_text()
        for word in ("import time", "import threading", "import datetime", "from time", "to_thread", "run_in_executor"):
            assert word not in text, f"{path.name} has {word!r}"
