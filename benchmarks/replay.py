"""Replay a run that was killed and lost an engine, and compare the weights of every version, bit for bit.

A real multi-task run loses its only engine (kill -9) at a third of its steps and its controller (kill -9) at two
thirds, and is resumed. `rollart replay` then trains every batch of the surviving history again, from the ledger. Last
line: `identical`; `versions` that were compared, of `steps`; `resumes` and `engines_lost` in the event log; seconds of
both; and the bytes a step that only a replay needs add to the event log.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

from benchmarks.crash import END_DEADLINE, RUN, kill, start
from benchmarks.scratch import scratch_folder
from rollart.core.event_log import exists, read_events
from rollart.core.events import BatchTaken, Published, RunStarted, ServiceEnded, ServiceStarted


def wait_for(folder: Path, process: subprocess.Popen[bytes], version: int) -> None:
    """Until a version is published."""
    deadline = time.monotonic() + END_DEADLINE
    while not _published(folder, version):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the run did not get there in time; see controller.log")
        time.sleep(0.2)


def _published(folder: Path, version: int) -> bool:
    log = folder / "events"
    return exists(log) and any(event.version >= version for event in read_events(log, Published))


def kill_engine(folder: Path) -> None:
    engines = [event for event in read_events(folder / "events", ServiceStarted) if event.role == "generate"]
    os.kill(engines[-1].pid, signal.SIGKILL)


def train(steps: int, scratch: Path) -> Path:
    """The folder of a run with a lost engine and a killed controller in it."""
    run, folder = scratch / "replay.yaml", scratch / "run"
    run.write_text(RUN + "ledger: {keep: all}\n")
    folder.mkdir()
    until = "--set", f"training.steps={steps}"
    process = start(run, folder, *until)
    wait_for(folder, process, steps // 3)
    kill_engine(folder)
    wait_for(folder, process, 2 * steps // 3)
    kill(process)
    if start(run, folder, *until).wait(END_DEADLINE):
        raise SystemExit("the resumed run failed; see controller.log")
    return folder


def replayed(folder: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "rollart.app.cli", "replay", str(folder), "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=END_DEADLINE)
    if done.returncode == 2:
        raise SystemExit("the replay was refused, see above")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def log_bytes(folder: Path) -> float:
    """Compressed, of what only a replay reads, a step."""
    only = {BatchTaken: "members", Published: "digests"}
    lines = [str(getattr(event, only[type(event)])) for event in read_events(folder / "events", *only)]
    return len(zstandard.compress("\n".join(lines).encode(), 7)) / max(1, len(lines) // 2)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.monotonic()
    return work(), round(time.monotonic() - began, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    steps = 4 if options.smoke else options.steps
    with scratch_folder("replay") as scratch:
        folder, train_s = timed(lambda: train(steps, scratch))
        result, replay_s = timed(lambda: replayed(folder))
        lost = [event for event in read_events(folder / "events", ServiceEnded) if event.role == "generate"]
        print(
            json.dumps(
                {
                    "identical": result["identical"],
                    "versions": result["compared"],
                    "steps": steps,
                    "resumes": sum(event.resumed for event in read_events(folder / "events", RunStarted)),
                    "engines_lost": len(lost),
                    "first_difference": result["difference"],
                    "train_s": train_s,
                    "replay_s": replay_s,
                    "log_bytes_per_step": round(log_bytes(folder)),
                }
            )
        )


if __name__ == "__main__":
    main()
