"""Kill -9 the controller at random moments of a real training run and resume it, again and again.

After every kill the ledger is read as the kill left it. Last line: `lost`, trajectories that were ready or leased and
that the finished run neither trained, nor holds, nor dropped with a reason; `trained_twice`, groups in two batches of
the surviving history; `left_behind`, processes that outlived the controller.
"""

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from benchmarks.scratch import scratch_folder
from rollart.core.event_log import read_events
from rollart.core.events import BatchTaken, GroupDropped, GroupReady, GroupStarted, RolledBack, RunEnded, RunStarted

START_DEADLINE = 120.0
END_DEADLINE = 600.0

RUN = """
name: crash
model: {tiny: {hidden: 64, layers: 2, context: 256}}
tasks:
  - {name: guess_number, env: "rollart.envs.guess_number:GuessNumber", max_turns: 4, max_context: 200,
     sampling: {max_tokens: 6}}
  - {name: frozen_lake, env: "rollart.envs.frozen_lake:FrozenLake", max_turns: 4, max_context: 200,
     sampling: {max_tokens: 3}}
rollout: {extra_members: 1}
training: {steps: STEPS, batch_groups: 6, group_size: 4}
evaluation: {every: 0, final_episodes: 2}
checkpoint: {every: 2}
"""


def start(run: Path, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rollart.app.cli", "train", str(run), "--run-dir", str(folder)]
    if (folder / "run.yaml").exists():
        command.append("--resume")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(folder.parent / "controller.log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def lives(folder: Path) -> list[list[Any]]:
    """The events of the run, one list for each time that it was started."""
    log = folder / "events"
    found: list[list[Any]] = []
    for event in read_events(log):
        if isinstance(event, RunStarted):
            found.append([])
        found[-1].append(event)
    return found


def wait_for_rollout(process: subprocess.Popen[bytes], folder: Path, life: int) -> None:
    """Until this life of the run trains, so that the kill does not hit the imports."""
    deadline = time.monotonic() + START_DEADLINE
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return
        history = lives(folder)
        if len(history) > life and any(isinstance(event, GroupStarted | GroupReady) for event in history[-1]):
            return
        time.sleep(0.2)
    raise SystemExit("the run did not start in time; see controller.log")


def kill(process: subprocess.Popen[bytes]) -> int:
    """Kill the controller alone; how many of its descendants are still there ten seconds later."""
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    for one in alive:
        one.kill()
    return len(alive)


def kept(folder: Path) -> set[str]:
    """The trainable trajectories that the ledger holds for groups that may still be trained."""
    database = sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True)
    rows = database.execute(
        "select t.id from trajectories t join groups g on g.id = t.grp "
        "where t.trainable and not t.held_out and g.state in ('open', 'leased')"
    ).fetchall()
    database.close()
    return {row[0] for row in rows}


def surviving(log: Path) -> tuple[dict[int, list[str]], set[str]]:
    """The batches by step of the history that the checkpoints kept, and the groups dropped with a reason."""
    batches: dict[int, list[str]] = {}
    dropped: set[str] = set()
    for event in read_events(log):
        match event:
            case RunStarted() | RolledBack():
                batches = {step: ids for step, ids in batches.items() if step < event.version}
            case BatchTaken():
                batches[event.step] = event.ids
            case GroupDropped():
                dropped.add(event.group)
    return batches, dropped


def crash_and_resume(kills: int, steps: int, seed: int, scratch: Path) -> dict[str, Any]:
    rng = random.Random(seed)
    run, folder = scratch / "crash.yaml", scratch / "run"
    run.write_text(RUN.replace("STEPS", str(steps)))
    folder.mkdir()
    at_kill: set[str] = set()
    left_behind = done = 0
    while done < kills:
        life = len(lives(folder))
        process = start(run, folder)
        wait_for_rollout(process, folder, life)
        time.sleep(rng.uniform(0.0, min(4.0, steps / 4)))
        if process.poll() is not None:
            break
        left_behind += kill(process)
        done += 1
        at_kill |= kept(folder)
        began = lives(folder)[-1][0].version
        print(f"kill {done}: this life began at version {began}; {len(at_kill)} trajectories seen ready", flush=True)
    process = start(run, folder)
    process.wait(END_DEADLINE)
    last = lives(folder)[-1][-1]
    batches, dropped = surviving(folder / "events")
    held = kept(folder)
    trained = Counter(group for ids in batches.values() for group in ids)
    lost = [
        one
        for one in at_kill
        if (group := one.rsplit(".", 1)[0]) not in trained and group not in dropped and one not in held
    ]
    return {
        "kills": done,
        "lost": len(lost),
        "trained_twice": sum(count > 1 for count in trained.values()),
        "left_behind": left_behind,
        "steps": len(batches),
        "finished": isinstance(last, RunEnded) and last.reason == "finished" and len(batches) == steps,
        "ready_at_kills": len(at_kill),
        "dropped_groups": len(dropped),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    kills, steps = (1, 4) if options.smoke else (options.kills, options.steps)
    with scratch_folder("crash") as scratch:
        print(json.dumps(crash_and_resume(kills, steps, options.seed, scratch)))


if __name__ == "__main__":
    main()
