"""Replay a run that was killed and lost an engine, and compare the weights of every version, bit for bit.

A real multi-task run loses its only engine (kill -9) at a third of its steps and its controller (kill -9) at two
thirds, and is resumed. `rollart replay` then trains every batch of the surviving history again, from the ledger, and
`rollart replay --control` takes every decision of scheduler, router and batcher again, from the tapes of both lives.
Last line: `identical`; `versions` that were compared, of `steps`; `control_identical` and the `decisions` that were
compared; `resumes` and `engines_lost` in the event log; seconds of each; the bytes a step that only a replay needs add
to the event log, and those of the tapes.

`--record FOLDER` makes the small runs whose tapes are in tests/replays instead.
"""

import argparse
import json
import os
import shutil
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
from rollart.core.event_log import log_bytes as tape_bytes
from rollart.core.events import BatchTaken, Published, RunStarted, ServiceEnded, ServiceStarted
from rollart.fleet.control_services import tapes_of

SMOKE_STEPS = 4


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
    run.write_text(RUN + "ledger: {keep: all, control: true}\n")
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


SMALL = {
    "two_tasks": RUN.replace("every: 0", "every: 2, episodes: 2"),
    "agents": """
name: agents
model: {tiny: {hidden: 64, layers: 2, context: 256}}
tasks: [{name: digits, agent: "rollart.agents.demo:digits", max_turns: 3, max_context: 200, sampling: {max_tokens: 4}}]
environments: {processes: 8}
training: {batch_groups: 2, group_size: 2}
evaluation: {every: 0, final_episodes: 2}
""",
}


def record(into: Path, scratch: Path) -> None:
    """The tapes of a run with a kill and a lost engine, and of those in `SMALL`."""
    runs = {"resumed": train(SMOKE_STEPS, scratch)}
    for name, text in SMALL.items():
        run, runs[name] = scratch / f"{name}.yaml", scratch / name
        run.write_text(text + "ledger: {control: true}\n")
        runs[name].mkdir()
        if start(run, runs[name], "--set", f"training.steps={SMOKE_STEPS}").wait(END_DEADLINE):
            raise SystemExit(f"the run {name} failed; see controller.log")
    for name, folder in runs.items():
        shutil.rmtree(into / name, ignore_errors=True)
        shutil.copytree(folder / "control", into / name / "control")


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
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="make the tapes of tests/replays")
    options = parser.parse_args()
    steps = SMOKE_STEPS if options.smoke else options.steps
    with scratch_folder("replay") as scratch:
        if options.record:
            record(options.record, scratch)
            print(json.dumps({"recorded": str(options.record)}))
            return
        folder, train_s = timed(lambda: train(steps, scratch))
        result, replay_s = timed(lambda: replayed(folder))
        control, control_s = timed(lambda: replayed(folder, "--control"))
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
                    "control_identical": control["identical"],
                    "decisions": control["decisions"],
                    "control_difference": control["difference"],
                    "train_s": train_s,
                    "replay_s": replay_s,
                    "control_s": control_s,
                    "log_bytes_per_step": round(log_bytes(folder)),
                    "tape_bytes_per_step": round(sum(map(tape_bytes, tapes_of(folder))) / steps),
                }
            )
        )


if __name__ == "__main__":
    main()
