"""A long run with environments that hang and crash: does anything grow?

    python benchmarks/soak.py [--minutes 30] [--environments 1000]

A real training run keeps that many environments alive, each in a process of its own; of its episodes 2% hang and 1%
crash. Every few seconds memory, open files and threads of every service and host are read, and the number of processes.
The slope of each series, after the first third as warm-up, is the median of the slopes of all pairs of its points
(Theil-Sen), which a few outliers cannot move. Memory is the private part (USS), so shared pages are counted once.

Last line: `growth_mb_per_hour` of the process that grows fastest, by process in `growth`; the slopes of open files and
of processes per hour, relative to what there was (`files_growth`, `processes_growth`); what was played and what failed.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos_faults import Target
from benchmarks.crash import Lives
from benchmarks.scratch import scratch_folder
from rollart.core.event_log import read_events
from rollart.core.events import EnvironmentLost, TrajectoryEnded

HANG, CRASH, TURNS = 0.02, 0.01, 3
WARMUP = 1 / 3
POINTS = 200  # most of a series that the slope is computed from
STOP_S = 120.0

RUN = """
name: soak
model: {tiny: {hidden: 32, layers: 1, context: 128}}
tasks:
  - name: faulty
    env: "benchmarks.fault_injection:Chaos"
    args: {env: "benchmarks.paced:Paced", args: {steps: TURNS, scale: 0.5}, hang: HANG, crash: CRASH}
    max_turns: TURNS
    max_context: 100
    isolation: process
    sampling: {max_tokens: 2}
environments: {processes: PROCESSES, step_deadline: 60, reset_deadline: 120, quarantine: {rate: 1.0, groups: 1000}}
engine: {max_batch: 256}
training: {steps: 100000, batch_groups: GROUPS, group_size: 8}
evaluation: {every: 0, final_episodes: 1}
checkpoint: {every: 5}
"""


def run_file(environments: int) -> str:
    """The pipeline of `alpha + 1` batches has as many trajectories as there are environments."""
    calls = TURNS + 1
    values = {"HANG": HANG / calls, "CRASH": CRASH / calls, "TURNS": TURNS, "PROCESSES": environments}
    text = RUN.replace("GROUPS", str(max(1, environments // 16)))
    for name, value in values.items():
        text = text.replace(name, str(value))
    return text


class Samples:
    """Series of (seconds, value), by process for memory and files."""

    def __init__(self, target: Target) -> None:
        self.target, self._began = target, time.monotonic()
        self.memory: dict[str, list[tuple[float, float]]] = {}
        self.files: list[tuple[float, float]] = []
        self.processes: list[tuple[float, float]] = []

    def take(self) -> None:
        now, files = time.monotonic() - self._began, 0
        by_role = self.target.processes() | {"controller": [psutil.Process(self.target.controller.pid)]}
        services = {role: there for role, there in by_role.items() if not role.endswith(" process")}
        for role, there in services.items():
            for number, process in enumerate(there):
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.memory.setdefault(f"{role} {number}", []).append((now, process.memory_full_info().uss / 2**20))
                    files += process.num_fds()
        self.files.append((now, files))
        self.processes.append((now, sum(map(len, by_role.values()))))


def slope(series: Sequence[tuple[float, float]]) -> float:
    """Per hour, by Theil and Sen, without the warm-up."""
    end = series[-1][0]
    settled = [point for point in series if point[0] >= WARMUP * end]
    thinned = settled[:: 1 + len(settled) // POINTS]
    slopes = [(b - a) / (t - s) for (s, a), (t, b) in combinations(thinned, 2) if t > s]
    return 3600 * statistics.median(slopes) if slopes else 0.0


def relative(series: Sequence[tuple[float, float]]) -> float:
    return round(slope(series) / max(1.0, statistics.median(value for _, value in series)), 3)


def soak(minutes: float, environments: int, every: float, scratch: Path) -> dict[str, Any]:
    folder, file = scratch / "run", scratch / "soak.yaml"
    folder.mkdir()
    file.write_text(run_file(environments))
    with open(scratch / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollart.app.cli", "train", str(file), "--run-dir", str(folder)],
            stdout=log,
            stderr=log,
        )
    try:
        lives = Lives(folder)
        lives.wait_for_rollout(process)
        samples = Samples(Target(process, folder, scratch))
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until and process.poll() is None:
            time.sleep(every)
            samples.take()
        survived = process.poll() is None
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its services end with it
            raise
    lives.look()
    growth = {name: round(slope(series), 1) for name, series in samples.memory.items() if len(series) > 3}
    outcomes = Counter(event.outcome.value for event in read_events(folder / "events", TrajectoryEnded))
    return {
        "growth_mb_per_hour": max(growth.values()),
        "growth": growth,
        "memory_mb": {name: round(series[-1][1], 1) for name, series in samples.memory.items()},
        "files_growth": relative(samples.files),
        "processes_growth": relative(samples.processes),
        "processes": int(max(value for _, value in samples.processes)),
        "files": int(samples.files[-1][1]),
        "outcomes": dict(outcomes),
        "processes_lost": sum(1 for _ in read_events(folder / "events", EnvironmentLost)),
        "steps": lives.trained,
        "survived": survived,
        "minutes": minutes,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--environments", type=int, default=1000)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    minutes, environments, every = (0.2, 32, 1.0) if options.smoke else (options.minutes, options.environments, 5.0)
    with scratch_folder("soak") as scratch:
        print(json.dumps(soak(minutes, environments, every, scratch)))
