"""How long the trainer waits for batches: batches of one size against batches that grow (`rollout.elastic`).

Simulated: the paper's production job on a part of its devices, with everything in proportion. Real: two games with
environments as slow as in production, real processes, the same start model. `idle` is the share of a step that the
trainer waits for its batch, after the steps that sizes take to settle; `batch` is the size then, in multiples of
`training.batch_groups`; `tokens_per_s` counts trained tokens. Last line: all of these.
"""

import argparse
import asyncio
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.schedules import SMOKE, Size, play, run_file
from benchmarks.scratch import scratch_folder
from benchmarks.simulator import WHOLE, scaled
from rollart.config import RunFile
from rollart.core.event_log import read_events
from rollart.core.events import BatchTaken
from rollart.fleet import controller
from rollart.simulator.simulation import simulate


def summary(folder: Path, groups: int, settled: int) -> dict[str, Any]:
    """Of the batches after the first `settled`: each waited for, then trained until the next is asked for."""
    taken = [event for event in read_events(folder / "events") if isinstance(event, BatchTaken)]
    before, counted = taken[settled - 1], taken[settled:]
    seconds = counted[-1].t - before.t
    return {
        "idle": round(sum(event.waited_s for event in counted) / seconds, 3),
        "batch": round(fmean(sum(event.groups.values()) for event in counted) / groups, 2),
        "tokens_per_s": round(sum(event.tokens for event in counted) / seconds),
        "age_max": max(age for event in taken for age in event.staleness),
        "step_s": round(seconds / len(counted), 2),
    }


def simulated(folder: Path, gpus: int, steps: int, elastic: float) -> dict[str, Any]:
    changes = ("simulate.log=full", "simulate.sample_s=3600", f"rollout.elastic={elastic}")
    scenario = scaled(gpus, changes)
    scenario = scenario.model_copy(update={"training": scenario.training.model_copy(update={"steps": steps})})
    simulate(scenario, folder=folder)
    return summary(folder, scenario.training.batch_groups, steps // 2)


def real(run: RunFile, folder: Path, model: Path, elastic: float) -> dict[str, Any]:
    played = play(run, {"elastic": elastic}, model, folder)
    return summary(folder, run.training.batch_groups, run.training.steps // 2) | {"success": played["success"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elastic", type=float, default=6.0)
    parser.add_argument("--gpus", type=int, default=WHOLE // 16, help=f"of the simulated job, which has {WHOLE}")
    parser.add_argument("--simulated-steps", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40, help="of the real runs")
    parser.add_argument("--groups", type=int, default=6, help="of a batch of the real runs")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    factors = [("fixed", 1.0), ("elastic", options.elastic)]
    size = Size(options.steps, groups=options.groups, demonstrations=600, warmup=100, episodes=100)
    if options.smoke:
        size, options.gpus, options.simulated_steps = SMOKE, 24, 4
        del factors[0]
    found: dict[str, dict[str, Any]] = {"simulated": {}, "real": {}}
    with scratch_folder("elastic") as scratch:
        asyncio.run(controller.train(run_file(scratch, size, 0.0), scratch / "warm", stage="sft"))
        for name, factor in factors:
            folder = scratch / name
            found["simulated"][name] = simulated(folder / "simulated", options.gpus, options.simulated_steps, factor)
            delay = 0.01 if options.smoke else 0.05
            run = run_file(scratch, size, delay)
            found["real"][name] = real(run, folder / "real", scratch / "warm" / "model", factor)
            print(name, json.dumps({kind: results[name] for kind, results in found.items()}), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
