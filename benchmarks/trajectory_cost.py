"""What one trajectory costs, in CPU milliseconds of every process of a real run.

    python benchmarks/trajectory_cost.py [--steps 12] [--groups 36] [--profile FILE]

Trains the quickstart's model, without its warmup, on one task at a time, and reads the CPU time of all processes
between two optimizer steps: one-turn trajectories of up to 26 sampled tokens (`column_sum`), and `guess_number` with
one guess and with nine, whose difference is the cost of eight further turns. `--profile` records the controller with
py-spy.

The last line is one JSON object. `cpu_ms_per_trajectory` is controller, environment hosts and reward hosts for a
one-turn trajectory, `cpu_ms_per_turn` the same for each further turn; `engine_ms` and `trainer_ms` are for the one-turn
one. CPU time means something on a busy machine too, but caches are colder there: expect a fifth more.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.scratch import scratch_folder

DEADLINE = 900.0
WARM = 3  # steps before the first reading: processes start, caches fill
MODEL = {"tiny": {"architecture": "qwen3", "hidden": 96, "layers": 3, "heads": 3, "kv_heads": 1, "context": 512}}
ONE_TURN = {
    "name": "column_sum",
    "env": "rollart.envs.column_sum:ColumnSum",
    "reward": "benchmarks.trajectory_cost:score",
    "max_context": 200,
    "sampling": {"max_tokens": 26},
}
SHORT, LONG = 1, 9


def score(episode: Any) -> float:
    """Differs within a group, so that there is something to learn, and costs as little as a real one."""
    return float(len(set(episode.turns[-1].action)) % 2)


def guesses(number: int) -> dict[str, Any]:
    return {
        "name": "guess_number",
        "env": "rollart.envs.guess_number:GuessNumber",
        "args": {"top": 2_000_000, "min_width": 1_000_000, "max_width": 1_000_000, "guesses": number},
        "max_turns": number,
        "max_context": 400,
        "sampling": {"max_tokens": 4},
    }


def run_file(task: dict[str, Any], steps: int, groups: int) -> dict[str, Any]:
    return {
        "name": "cost",
        "model": MODEL,
        "tasks": [task],
        "environments": {"processes": 128},
        "engine": {"max_batch": 128},
        "training": {"steps": steps, "batch_groups": groups, "group_size": 8, "lr": 1e-5, "dtype": "bfloat16"},
        "evaluation": {"every": 0, "final_episodes": 1},
        "checkpoint": {"every": 1000},
    }


def role(process: psutil.Process) -> str:
    """By the log that the process writes to."""
    try:
        return Path(f"/proc/{process.pid}/fd/2").readlink().stem.split("-")[0]
    except OSError:
        return "other"


def cpu_seconds() -> dict[str, float]:
    """Of this process, the controller, and of all its descendants by role, those that ended included."""
    times = psutil.Process().cpu_times()
    found = {"controller": times.user + times.system}
    for process in psutil.Process().children(recursive=True):
        try:
            times, name = process.cpu_times(), role(process)
        except psutil.NoSuchProcess:  # its time is in that of its parent
            continue
        found[name] = found.get(name, 0.0) + sum(times[:4])
    return found


def train(file: Path, folder: Path, steps: int) -> None:
    """The controller: runs in a process of its own, and prints its readings."""
    import rollart
    from rollart.core.events import AnyEvent, StepDone, TrajectoryEnded, TurnDone

    ended = turns = 0
    first: dict[str, Any] = {}

    def reading() -> dict[str, Any]:
        return {"cpu": cpu_seconds(), "trajectories": ended, "turns": turns}

    def on_event(event: AnyEvent) -> None:
        nonlocal ended, turns, first
        if isinstance(event, TurnDone):
            turns += 1
        elif isinstance(event, TrajectoryEnded):
            ended += 1
        elif isinstance(event, StepDone) and event.version == min(WARM, steps - 1):
            first = reading()
        elif isinstance(event, StepDone) and event.version == steps:
            print(json.dumps([first, reading()]), flush=True)

    rollart.train(str(file), folder=folder, on_event=on_event)


def measure(task: dict[str, Any], steps: int, groups: int, scratch: Path, profile: Path | None) -> dict[str, float]:
    """CPU milliseconds per trajectory by role, and `turns`."""
    file, folder = scratch / "run.yaml", scratch / "run"
    scratch.mkdir()
    file.write_text(yaml.safe_dump(run_file(task, steps, groups)))
    command = [sys.executable, __file__, "--child", str(file), str(folder), "--steps", str(steps)]
    if profile:
        py_spy = [str(Path(sys.executable).parent / "py-spy"), "record", "-r", "200", "-f", "raw", "-o", str(profile)]
        command = [*py_spy, "--", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path.cwd())}
    with open(scratch / "log", "wb") as log:
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=log, env=environment, timeout=DEADLINE, check=False
        )
    if ended.returncode:
        raise SystemExit(f"the run failed: {(scratch / 'log').read_text()[-2000:]}")
    line = next(line for line in ended.stdout.decode().splitlines() if line.startswith("[{"))
    before, after = json.loads(line)
    count = max(1, after["trajectories"] - before["trajectories"])
    cost = {name: 1000 * (s - before["cpu"].get(name, 0.0)) / count for name, s in after["cpu"].items()}
    cost["hosts"] = cost.get("environments", 0.0) + cost.get("rewards", 0.0)
    cost["turns"] = (after["turns"] - before["turns"]) / count
    shown = ", ".join(f"{name} {value:.2f}" for name, value in sorted(cost.items()))
    print(f"{task['name']}, {count} trajectories: {shown} (CPU ms each)", flush=True)
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of each run")
    parser.add_argument("--groups", type=int, default=36, help="groups of 8 trajectories in a step")
    parser.add_argument("--profile", type=Path, help="write py-spy's stacks of the one-turn run's controller here")
    parser.add_argument("--only-one-turn", action="store_true", help="leave out the runs of several turns")
    parser.add_argument("--smoke", action="store_true", help="small: shows only that it works")
    parser.add_argument("--child", type=Path, nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        file, folder = chosen.child
        train(file, folder, chosen.steps)
        return
    steps, groups = (3, 4) if chosen.smoke else (chosen.steps, chosen.groups)
    with scratch_folder("trajectory_cost") as scratch:
        one = measure(ONE_TURN, steps, groups, scratch / "one", chosen.profile)
        result = {
            "cpu_ms_per_trajectory": one["controller"] + one["hosts"],
            "controller_ms": one["controller"],
            "environment_hosts_ms": one.get("environments", 0.0),
            "reward_hosts_ms": one.get("rewards", 0.0),
            "engine_ms": one["engine"],
            "trainer_ms": one["trainer"],
        }
        if not chosen.only_one_turn:
            short, long = (
                measure(guesses(number), steps, groups, scratch / str(number), None) for number in (SHORT, LONG)
            )
            further = long["turns"] - short["turns"]
            for key, parts in (("cpu_ms_per_turn", ("controller", "hosts")), ("engine_ms_per_turn", ("engine",))):
                result[key] = sum(long[part] - short[part] for part in parts) / further
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
