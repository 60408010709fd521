"""Kill -9 the controller at random moments of a real training run and resume it, again and again.

One kill in `START_EVERY` comes at any moment of the start, the others while the run trains. After every kill the ledger
is read as the kill left it. Last line: `lost`, trajectories that were ready or leased and that the finished run neither
trained, nor holds, nor dropped with a reason; `trained_twice`, groups in two batches of the surviving history;
`left_behind`, processes that outlived the controller by more than `LEFT_S`, and shared memory of the run.

With `--folder` the run and the account of its kills stay there: the same command goes on where it was stopped.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.scratch import scratch_folder
from rollart.config import loading
from rollart.core.event_log import EventReader, read_events
from rollart.core.events import (
    BatchTaken,
    Checkpointed,
    GroupDropped,
    GroupReady,
    RolledBack,
    RunEnded,
    RunStarted,
    StepDone,
)
from rollart.fleet.fleet import weights_folder

START_DEADLINE = 180.0
END_DEADLINE = 900.0
START_EVERY = 4
START_S = 8.0  # a start without other load
TRAINING_S = 1.5  # from the first group until the kill, on average
LEFT_S = 10.0
LAST_STEPS = 4

SMALL = """
model: {tiny: {hidden: 64, layers: 2, context: 256}}
tasks:
  - {name: guess_number, env: "rollart.envs.guess_number:GuessNumber", max_turns: 4, max_context: 200,
     sampling: {max_tokens: 6}}
  - {name: frozen_lake, env: "rollart.envs.frozen_lake:FrozenLake", max_turns: 4, max_context: 200,
     sampling: {max_tokens: 3}}
"""
RUN = f"""
name: crash
{SMALL}
rollout: {{extra_members: 1}}
training: {{steps: 100000, batch_groups: 6, group_size: 4}}
evaluation: {{every: 0, final_episodes: 2}}
checkpoint: {{every: 2}}
"""


def start(run: Path, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rollart.app.cli", "train", str(run), "--run-dir", str(folder)]
    if (folder / "run.yaml").exists():
        command.append("--resume")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(folder.parent / "controller.log", "ab") as log:
        return subprocess.Popen([*command, *options], stdout=log, stderr=log, env=environment, start_new_session=True)


class Lives:
    """Follows the log of a run: how often it was started, where the last time, whether that life trains, and the
    versions that are trained and saved."""

    def __init__(self, folder: Path) -> None:
        self._reader = EventReader(
            folder / "events", RunStarted, RolledBack, GroupReady, BatchTaken, StepDone, Checkpointed, RunEnded
        )
        self.count = self.version = self.trained = self.checkpointed = 0
        self.trains = False
        self.end = ""

    def look(self) -> None:
        for event in self._reader.read():
            match event:
                case RunStarted():
                    self.count, self.version, self.trains, self.end = self.count + 1, event.version, False, ""
                    self.trained = self.checkpointed = event.version
                case RolledBack() | StepDone():
                    self.trained = event.version
                case Checkpointed():
                    self.checkpointed = event.version
                case GroupReady() | BatchTaken():
                    self.trains = True
                case RunEnded():
                    self.end = event.reason

    def wait_for_rollout(self, process: subprocess.Popen[bytes]) -> None:
        """Until a life after the ones seen so far trains, or the process has ended."""
        deadline, seen = time.monotonic() + START_DEADLINE, self.count
        while process.poll() is None and not (self.count > seen and self.trains):
            if time.monotonic() > deadline:
                raise SystemExit("the run did not start in time; see controller.log")
            time.sleep(0.05)
            self.look()


def kill(process: subprocess.Popen[bytes]) -> list[str]:
    """Kill the controller alone; what is still there of its descendants some seconds later."""
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=LEFT_S)
    left = []
    for one in alive:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now, which is late all the same
            left.append(f"process {one.pid} ({one.status()}): {' '.join(one.cmdline())[:120]}")
            one.kill()
    return left


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


@dataclass
class Account:
    """What is remembered between kills. In a file, so that a benchmark that is stopped goes on later."""

    kills: int = 0
    seconds: float = 0.0
    ready: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Self:
        if not path.exists():
            return cls()
        known = json.loads(path.read_text())
        return cls(**known | {"ready": set(known["ready"])})

    def save(self, path: Path) -> None:
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(asdict(self) | {"ready": sorted(self.ready)}))
        draft.replace(path)


def one_kill(run: Path, folder: Path, lives: Lives, rng: random.Random, number: int) -> list[str]:
    """Start or resume the run and kill it. Returns what it left behind."""
    process = start(run, folder)
    try:
        if number % START_EVERY == START_EVERY - 1:
            time.sleep(rng.uniform(0.5, START_S))
        else:
            lives.wait_for_rollout(process)
            time.sleep(rng.expovariate(1 / TRAINING_S))
        if process.poll() is not None:
            raise SystemExit("the run ended by itself; see controller.log")
        return kill(process)
    finally:
        if process.poll() is None:  # this benchmark was stopped
            process.kill()
            process.wait()


def crash_and_resume(kills: int, seed: int, scratch: Path) -> dict[str, Any]:
    run, folder, path = scratch / "crash.yaml", scratch / "run", scratch / "account.json"
    run.write_text(RUN)
    folder.mkdir(exist_ok=True)
    account, lives = Account.load(path), Lives(folder)
    lives.look()
    while account.kills < kills:
        began = time.monotonic()
        rng = random.Random(f"{seed} {account.kills}")
        left = one_kill(run, folder, lives, rng, account.kills)
        lives.look()
        account.kills += 1
        account.left += left
        account.ready |= kept(folder)
        account.seconds += time.monotonic() - began
        account.save(path)
        print(
            f"kill {account.kills} after {time.monotonic() - began:.1f} s: this life began at version {lives.version}; "
            f"{len(account.ready)} trajectories seen ready",
            *left,
            flush=True,
        )
    process = start(run, folder, "--set", f"training.steps={lives.trained + LAST_STEPS}")
    process.wait(END_DEADLINE)
    lives.look()
    return results(account, folder) | {"finished": lives.end == "finished" and process.returncode == 0}


def results(account: Account, folder: Path) -> dict[str, Any]:
    batches, dropped = surviving(folder / "events")
    held, memory = kept(folder), weights_folder(loading.load(folder / "run.yaml"), folder)
    trained = Counter(group for ids in batches.values() for group in ids)
    lost = [
        one
        for one in account.ready
        if (group := one.rsplit(".", 1)[0]) not in trained and group not in dropped and one not in held
    ]
    return {
        "kills": account.kills,
        "lost": len(lost),
        "trained_twice": sum(count > 1 for count in trained.values()),
        "left_behind": len(account.left) + memory.exists(),
        "steps": len(batches),
        "ready_at_kills": len(account.ready),
        "dropped_groups": len(dropped),
        "seconds_per_kill": round(account.seconds / max(1, account.kills), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the run here, and go on with it")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the run that it started ends with it
    with contextlib.nullcontext(options.folder) if options.folder else scratch_folder("crash") as scratch:
        scratch.mkdir(parents=True, exist_ok=True)
        print(json.dumps(crash_and_resume(1 if options.smoke else options.kills, options.seed, scratch)))


if __name__ == "__main__":
    main()
