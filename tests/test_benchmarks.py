"""Every benchmark runs, and prints one JSON object on its last line."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text())
NEEDS = {"ray_faults": "ray", "rewards": "ray"}
DEADLINE_S = 300.0


@pytest.mark.benchmark
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_and_ends_with_a_json_object(name: str) -> None:
    if (module := NEEDS.get(name)) and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--smoke"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert isinstance(json.loads(done.stdout.splitlines()[-1]), dict)
