"""Batch rollout, turn by turn for all trajectories together, against each trajectory on its own clock.

    python benchmarks/batch_vs_trajectory.py [--trajectories 64] [--turns 10] [--mean 0.25]

Each turn of the environment takes a Gaussian time, whose sigma is a share of its mean. Both ways play one whole batch
with the same real engine (a tiny model in a process of its own), the same environments in real processes and the same
scheduler; only its lockstep differs, that of the `sync` preset. They take turns, so a busy machine slows both alike.
The last line is one JSON object: `speedup` for each sigma, and the seconds of both.
"""

import argparse
import asyncio
import json
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.scratch import scratch_folder
from rollart.config import RunFile, TinyModelConfig
from rollart.core.event_log import EventLog
from rollart.core.schedule import Schedule
from rollart.core.types import Sampling
from rollart.fleet.fleet import Fleet
from rollart.models.tiny import make
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.lockstep import Lockstep
from rollart.rollout.scheduler import Scheduler
from rollart.rollout.trajectory import RolloutTask, TrajectoryRunner

SIGMAS = (0.1, 0.25, 0.5, 0.75, 1.0)
GROUP, TOKENS, CONTEXT = 8, 8, 1024


def run_file(model: Path, trajectories: int, turns: int, mean: float) -> RunFile:
    tasks = [
        {
            "name": f"sigma-{sigma:g}".replace(".", "_"),
            "env": "benchmarks.paced:Gaussian",
            "args": {"turns": turns, "mean": mean, "sigma": sigma},
            "max_turns": turns,
            "max_context": CONTEXT,
            "sampling": {"max_tokens": TOKENS},
        }
        for sigma in SIGMAS
    ]
    return RunFile.model_validate(
        {
            "name": "batch-vs-trajectory",
            "model": {"path": model},
            "tasks": tasks,
            "engine": {"max_batch": trajectories},
            # Second resets would serve neither side: these take no time.
            "environments": {"processes": trajectories, "hedges": 0},
        }
    )


async def play(
    fleet: Fleet, log: EventLog, folder: Path, task: RolloutTask, trajectories: int, lockstep: bool
) -> float:
    """Seconds until the scheduler has its batch."""
    with closing(SqliteLedger.open(folder / f"{time.time_ns()}.sqlite")) as ledger:
        runner = TrajectoryRunner(
            environments=fleet.environments,
            router=fleet.router,
            renderer=fleet.renderer,
            rewards=fleet.rewards,
            sink=log,
            lockstep=Lockstep() if lockstep else None,
        )
        scheduler = Scheduler(
            tasks=[task],
            schedule=Schedule(alpha=0, window=1.0, lockstep=lockstep, score_late=lockstep),
            batch_groups=trajectories // GROUP,
            group_size=GROUP,
            steps=1,
            retries=0,
            seed=0,
            runner=runner,
            engines=fleet.router.engines,
            ledger=ledger,
            sink=log,
        )
        began = time.monotonic()
        batch = await scheduler.take_batch()
        took = time.monotonic() - began
        await scheduler.stop()
        assert sum(len(group.samples) for group in batch.groups) == trajectories
        return took


async def compare(folder: Path, trajectories: int, turns: int, mean: float, rounds: int) -> dict[str, Any]:
    model = make(TinyModelConfig(hidden=96, layers=3, heads=3, kv_heads=1, context=CONTEXT), folder / "model", seed=0)
    run = run_file(model, trajectories, turns, mean)
    log = EventLog(folder / "events", time.monotonic)
    seconds: dict[float, dict[bool, float]] = {}
    async with Fleet(run, folder, log, model=model, version=0, trainer=False) as fleet:
        for task, sigma in zip(run.tasks, SIGMAS, strict=True):
            plan = RolloutTask(task.name, 1.0, turns, CONTEXT, Sampling(max_tokens=TOKENS))
            await play(fleet, log, folder, plan, GROUP, lockstep=False)  # processes, and what is compiled on first use
            times: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(rounds):
                for lockstep in times:
                    times[lockstep].append(await play(fleet, log, folder, plan, trajectories, lockstep))
            seconds[sigma] = {lockstep: median(taken) for lockstep, taken in times.items()}
            together, alone = seconds[sigma][True], seconds[sigma][False]
            print(f"sigma {sigma:4}: {together:6.2f} s together, {alone:6.2f} s each on its own", flush=True)
    log.close()
    return {
        "speedup": {str(sigma): round(taken[True] / taken[False], 2) for sigma, taken in seconds.items()},
        "batch_s": {str(sigma): round(taken[True], 2) for sigma, taken in seconds.items()},
        "trajectory_s": {str(sigma): round(taken[False], 2) for sigma, taken in seconds.items()},
        "trajectories": trajectories,
        "turns": turns,
        "mean_s": mean,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--mean", type=float, default=0.25, help="seconds of an environment step")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.trajectories, options.turns, options.mean = GROUP, 2, 0.01
    with scratch_folder("batch") as folder:
        result = asyncio.run(compare(folder, options.trajectories, options.turns, options.mean, options.rounds))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
