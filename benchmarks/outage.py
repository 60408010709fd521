"""The only engine of a real training run dies, and its replacement takes a minute to start.

    python benchmarks/outage.py [--seconds 60]

All settings are defaults, sizes apart. Once the run has trained a few steps, its engine is killed (SIGKILL). The
engine that the run starts in its place is stopped (SIGSTOP) as soon as it is there, and goes on after `--seconds`: a
server of a large model takes that long to load. Then the run trains its other steps.

Last line: `finished`; `outage_s`, the longest time without a turn; `steps_before` and `steps_after` it;
`lost_trajectories`, which began and never ended with an outcome, or were ready and neither trained nor dropped with a
reason; `trained_twice`; `in_flight`, the outcomes of the trajectories that were under way when the engine died;
`quarantined`, tasks that had to leave the mixture; `violations` of the invariants of the audit.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.audit import audit
from benchmarks.chaos_faults import Target
from benchmarks.crash import END_DEADLINE, SMALL, Account, Lives, kept, results, start
from benchmarks.scratch import scratch_folder
from rollart.core.event_log import read_events
from rollart.core.events import Quarantined, StepDone, TrajectoryEnded, TrajectoryStarted, TurnDone

STEPS_DEADLINE = 180.0
POLL_S = 0.05

RUN = f"""
name: outage
{SMALL}
training: {{batch_groups: 6, group_size: 4}}
evaluation: {{every: 0, final_episodes: 2}}
"""


@contextmanager
def training(scratch: Path, steps: int) -> Iterator[Target]:
    file, folder = scratch / "outage.yaml", scratch / "run"
    file.write_text(RUN)
    folder.mkdir()
    controller = start(file, folder, "--set", f"training.steps={steps}")
    try:
        yield Target(controller, folder, scratch / "clock")
    finally:
        if controller.poll() is None:  # this benchmark failed or was stopped
            controller.kill()
            controller.wait()


def wait_for_steps(target: Target, lives: Lives, steps: int) -> None:
    deadline = time.monotonic() + STEPS_DEADLINE
    while lives.trained < steps:
        if target.controller.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run did not reach step {steps}; see controller.log")
        time.sleep(POLL_S)
        lives.look()


def strike(target: Target, seconds: float) -> None:
    """Kill the engine, and hold whatever is started in its place until the time is over."""
    (victim,) = target.processes()["engine"]
    victim.kill()
    held: dict[int, psutil.Process] = {}
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            for engine in target.processes().get("engine", ()):
                if engine.pid != victim.pid and engine.pid not in held:
                    engine.suspend()
                    held[engine.pid] = engine
            time.sleep(POLL_S)
    finally:
        for engine in held.values():
            with suppress(psutil.NoSuchProcess):
                engine.resume()
    print(f"killed engine {victim.pid}, held {', '.join(map(str, held)) or 'nothing'} for {seconds:g} s", flush=True)


def times(folder: Path) -> dict[str, Any]:
    """What the log says of the longest time without a turn, and of the trajectories around it."""
    events = list(read_events(folder / "events"))
    turns = [event.t for event in events if isinstance(event, TurnDone)]
    began, ended = max(pairwise(turns), key=lambda pair: pair[1] - pair[0])
    started = {event.trajectory: event.t for event in events if isinstance(event, TrajectoryStarted)}
    ends = {event.trajectory: event for event in events if isinstance(event, TrajectoryEnded)}
    hit = [ends[one] for one, t in started.items() if t <= began and one in ends and ends[one].t > began]
    steps = [event.t for event in events if isinstance(event, StepDone)]
    return {
        "outage_s": round(ended - began, 1),
        "steps_before": sum(t <= began for t in steps),
        "steps_after": sum(t > ended for t in steps),
        "never_ended": len(started.keys() - ends.keys()),
        "in_flight": dict(Counter(event.outcome.value for event in hit)),
        "quarantined": sorted({event.task for event in events if isinstance(event, Quarantined)}),
    }


def outage(seconds: float, before: int, after: int, scratch: Path) -> dict[str, Any]:
    with training(scratch, before + after) as target:
        lives = Lives(target.folder)
        wait_for_steps(target, lives, before)
        ready = kept(target.folder)
        strike(target, seconds)
        with suppress(subprocess.TimeoutExpired):
            target.controller.wait(END_DEADLINE)
        lives.look()
    found = times(target.folder)
    account = results(Account(kills=1, ready=ready), target.folder)
    return {
        "finished": lives.end == "finished" and target.controller.returncode == 0,
        **{key: found[key] for key in ("outage_s", "steps_before", "steps_after")},
        "lost_trajectories": found["never_ended"] + account["lost"],
        "trained_twice": account["trained_twice"],
        **{key: found[key] for key in ("in_flight", "quarantined")},
        "violations": len(audit(target.folder, ready)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the engine is away")
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to check that it runs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the run that it started ends with it
    seconds, before, after = (3.0, 2, 4) if options.smoke else (options.seconds, 10, 20)
    with scratch_folder("outage") as scratch:
        print(json.dumps(outage(seconds, before, after, scratch)))


if __name__ == "__main__":
    main()
