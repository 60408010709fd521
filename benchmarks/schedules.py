"""The same training, five ways to schedule it: one run, real processes, environments as slow as in production.

Model, tasks, seeds and number of steps are the same for every preset. Resets and steps are delayed by the paper's
distributions, scaled so that the mean step takes about 50 ms. Presets run one after the other, in rounds; a preset's
time is its time of RL alone, without warmup and evaluation. Last line: `speedup_vs` of rollart against each other
preset, the success that each reached on held-out episodes, and where the time of each went.
"""

import argparse
import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.scratch import scratch_folder
from rollart.config import RunFile
from rollart.config.rollout import RolloutConfig
from rollart.core.event_log import read_events
from rollart.core.events import EngineSample, StepDone
from rollart.fleet import controller as controller

PRESETS = ("sync", "sync_plus", "one_off", "start_bound", "rollart")
MEAN_STEP_S = 4.7  # of the paper's distribution
GAMES = "rollart.envs"


@dataclass(frozen=True, slots=True)
class Size:
    steps: int
    groups: int = 16
    processes: int = 256
    demonstrations: int = 1500
    warmup: int = 250
    episodes: int = 200


SMOKE = Size(steps=2, groups=2, processes=16, demonstrations=40, warmup=2, episodes=2)


def run_file(folder: Path, size: Size, delay: float) -> RunFile:
    """With no delay, the plain games, which the players of the warmup can look into."""

    def task(name: str, kind: str, turns: int, tokens: int, skill: float) -> dict[str, Any]:
        game = f"{GAMES}.{name}:{kind}"
        return {
            "name": name,
            "env": "benchmarks.fault_injection:Chaos" if delay else game,
            "args": {"env": game, "delay": delay / MEAN_STEP_S} if delay else {},
            "player": f"{GAMES}.{name}:player",
            "player_args": {"skill": skill},
            "max_turns": turns,
            "max_context": 400,
            "sampling": {"max_tokens": tokens},
        }

    warmup = {"demonstrations": size.demonstrations, "steps": size.warmup}
    return RunFile.model_validate(
        {
            "name": "schedules",
            "output": folder,
            "model": {"tiny": {"context": 512}, "warmup": warmup},
            "tasks": [task("frozen_lake", "FrozenLake", 10, 4, 0.5), task("guess_number", "GuessNumber", 4, 6, 0.5)],
            "environments": {"processes": size.processes},
            "training": {"steps": size.steps, "batch_groups": size.groups, "lr": 5e-4, "dtype": "bfloat16"},
            "evaluation": {"every": 0, "episodes": 1, "final_episodes": size.episodes},
            "checkpoint": {"every": 1000},
        }
    )


def play(run: RunFile, rollout: dict[str, Any], model: Path, folder: Path) -> dict[str, Any]:
    ours = run.model_copy(
        update={
            "model": run.model.model_copy(update={"path": model, "tiny": None, "warmup": None}),
            "rollout": RolloutConfig(**rollout),
        }
    )
    summary = asyncio.run(controller.train(ours, folder))
    events = list(read_events(folder / "events"))
    busy = [event.busy_s for event in events if isinstance(event, EngineSample)]
    return {
        "seconds": summary["rl_seconds"],
        "success": {name: task["after"] for name, task in summary["tasks"].items()},
        "before": {name: task["before"] for name, task in summary["tasks"].items()},
        "trainer_s": sum(event.seconds for event in events if isinstance(event, StepDone)),
        "engine_s": busy[-1] - busy[0],
        "waited_s": summary["trainer_waited_s"],
        "staleness": summary["staleness"],
        "drops": summary["drops"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--delay", type=float, default=0.05, help="mean seconds of an environment step")
    parser.add_argument("--extra-members", type=int, default=1, help="redundancy of the rollart preset")
    parser.add_argument("--presets", nargs="*", default=PRESETS, choices=PRESETS)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    size = SMOKE if options.smoke else Size(options.steps)
    if options.smoke:
        options.rounds, options.delay, options.presets = 1, 0.01, ("sync", "rollart")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in options.presets}
    with scratch_folder("schedules") as scratch:
        run = run_file(scratch, size, options.delay)
        asyncio.run(controller.train(run_file(scratch, size, 0.0), scratch / "warm", stage="sft"))
        model = scratch / "warm" / "model"
        for number in range(options.rounds):
            for name in options.presets:
                extra = {"extra_members": options.extra_members} if name == "rollart" else {}
                result = play(run, {"preset": name, **extra}, model, scratch / f"{name}-{number}")
                results[name].append(result)
                print(f"{name:12} {result['seconds']:7.1f} s  {json.dumps(result)}", flush=True)
    seconds = {name: median(result["seconds"] for result in made) for name, made in results.items()}
    ours = seconds.get("rollart")
    print(
        json.dumps(
            {
                "speedup_vs": {name: round(s / ours, 2) for name, s in seconds.items() if ours and name != "rollart"},
                "seconds": {name: round(s, 1) for name, s in seconds.items()},
                "steps": size.steps,
                "success": {name: made[-1]["success"] for name, made in results.items()},
                "before": results[options.presets[0]][-1]["before"],
            }
        )
    )


if __name__ == "__main__":
    main()
