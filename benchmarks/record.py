"""Runs benchmarks with their defaults and keeps what they print, for the table in docs/benchmarks.md.

    python -m benchmarks.record house engine            # one after the other
    python -m benchmarks.record trainer -- --rounds 3   # with arguments of the benchmark's own

Each result is a file in benchmarks/results: the command, the JSON object of its last line, date, commit, processor, the
load of the machine before and after, and how long it took. A benchmark that fails leaves its former result alone. The
documentation shows these files and nothing else, so a number in the table was printed by its command on that commit.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def commit() -> str:
    """With a plus sign if the package or the benchmarks differ from it."""
    head = _git("rev-parse", "--short", "HEAD")
    return head + ("+" if _git("status", "--porcelain", "--", "rollart", "benchmarks/*.py") else "")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def run(name: str, more: list[str]) -> dict[str, Any]:
    """Raises SystemExit if the benchmark fails or its last line is not a JSON object."""
    before, at, began = os.getloadavg()[0], commit(), time.monotonic()
    command = [sys.executable, "-m", f"benchmarks.{name}", *more]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    last: deque[str] = deque(maxlen=1)
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last.append(line)
    try:
        result = json.loads(last[0]) if last else None
    except ValueError:
        result = None
    if process.returncode or not isinstance(result, dict):
        raise SystemExit(
            f"benchmarks.{name} ended with {process.returncode} and printed no result; nothing is recorded"
        )
    return {
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *more]),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": at,
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "seconds": round(time.monotonic() - began, 1),
        "result": result,
    }


def main() -> None:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["house"], help="benchmarks, by the name of their file")
    parser.add_argument("--smoke", action="store_true", help="run, but record nothing")
    args = parser.parse_args(words[:split])
    for name in args.names:
        if not (ROOT / "benchmarks" / f"{name}.py").exists():
            raise SystemExit(f"there is no benchmark {name!r}; benchmarks/ has one file for each")
    RESULTS.mkdir(exist_ok=True)
    for name in args.names:
        one = run(name, words[split + 1 :])
        if not args.smoke:
            (RESULTS / f"{name}.json").write_text(json.dumps(one, indent=1) + "\n")
    print(json.dumps({"ran": args.names, "recorded": not args.smoke}))


if __name__ == "__main__":
    main()
