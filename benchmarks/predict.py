"""Predicted against measured: calibrate on one real run, predict others by simulation, then run those for real.

All runs train the same tiny model on two games whose resets and steps take as long as the paper measured, scaled, and
share the cores of this machine. The learning rate is so small that the policy stays what it is: this is about time. All
predictions are made from the log of the first run alone, before any other begins. Step time is from the end of the
first training step to the end of the last, per step. The machine should have nothing else to do; its load is printed.
Last line: `median_error` and `worst_error`, relative to the measured step time.
"""

import argparse
import asyncio
import json
import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.scratch import scratch_folder
from rollart.config import RunFile
from rollart.core.event_log import read_events
from rollart.core.events import StepDone
from rollart.fleet import controller
from rollart.simulator.calibration import calibrate
from rollart.simulator.distributions import Distribution, LogNormal, MixturePart, Normal, draw_of
from rollart.simulator.scenario import Scenario
from rollart.simulator.simulation import simulate

MEAN_STEP_S = 4.7  # of the paper's distribution
GAMES = "rollart.envs"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is different from the first run; `steps` are chosen for half a minute."""

    steps: int
    preset: str = "rollart"
    alpha: int = 1
    groups: int = 8
    processes: int = 64
    slower: float = 1.0

    @property
    def rollout(self) -> dict[str, Any]:
        return {"preset": self.preset} | ({"alpha": self.alpha} if self.preset in ("rollart", "start_bound") else {})


CALIBRATION = Setting(steps=20)
SMOKE = Setting(steps=3, groups=2, processes=8)
SETTINGS = {
    "sync": Setting(5, preset="sync"),
    "sync_plus": Setting(10, preset="sync_plus"),
    "one_off": Setting(12, preset="one_off"),
    "alpha 2": Setting(24, alpha=2),
    "8 processes a task": Setting(8, processes=8),
    "16 groups": Setting(14, groups=16),
    "environments 2x slower": Setting(11, slower=2.0),
    "alpha 3, 12 processes, 1.5x slower": Setting(10, alpha=3, processes=12, slower=1.5),
}


def run_file(folder: Path, setting: Setting, delay: float, model: Path | None) -> RunFile:
    """Without a `model`, the plain games, for the players of the warmup."""

    def task(name: str, kind: str, turns: int, tokens: int) -> dict[str, Any]:
        game = f"{GAMES}.{name}:{kind}"
        return {
            "name": name,
            "env": "benchmarks.paced:Ordinary" if model else game,
            "args": {"env": game, "delay": setting.slower * delay / MEAN_STEP_S} if model else {},
            "player": f"{GAMES}.{name}:player",
            "player_args": {"skill": 0.5},
            "max_turns": turns,
            "max_context": 400,
            "sampling": {"max_tokens": tokens},
        }

    warmup = {"demonstrations": 20 * setting.steps, "steps": 4 * setting.steps}
    return RunFile.model_validate(
        {
            "name": "predict",
            "output": folder,
            "model": {"path": model} if model else {"tiny": {"context": 512}, "warmup": warmup},
            "tasks": [task("frozen_lake", "FrozenLake", 8, 4), task("guess_number", "GuessNumber", 4, 6)],
            "rollout": setting.rollout,
            "environments": {"processes": setting.processes},
            "training": {"steps": setting.steps, "batch_groups": setting.groups, "group_size": 4, "lr": 1e-7},
            "evaluation": {"every": 0, "episodes": 1, "final_episodes": 1},
            "checkpoint": {"every": 1000},
        }
    )


def measure(folder: Path, setting: Setting, delay: float, model: Path) -> float:
    """Seconds a step, for real."""
    asyncio.run(controller.train(run_file(folder, setting, delay, model), folder))
    ends = [event.t for event in read_events(folder / "events") if isinstance(event, StepDone)]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def scaled(given: float | Distribution, factor: float) -> float | Distribution:
    """Everything times `factor`, for instance for a slower environment."""
    if not isinstance(given, Distribution):
        return given * factor
    if given.geometric is not None:
        draw = draw_of(given)
        return Distribution(values=[factor * draw((n + 0.5) / 200) for n in range(200)])
    changed: dict[str, object] = {
        key: factor * value for key in ("exponential", "min", "max") if (value := getattr(given, key)) is not None
    }
    if given.normal is not None:
        changed["normal"] = Normal(mean=factor * given.normal.mean, sd=factor * given.normal.sd)
    if given.lognormal is not None:
        changed["lognormal"] = LogNormal(median=factor * math.exp(given.lognormal.mu), sigma=given.lognormal.sigma)
    if given.uniform is not None:
        changed["uniform"] = (factor * given.uniform[0], factor * given.uniform[1])
    if given.quantiles is not None:
        changed["quantiles"] = [(p, factor * value) for p, value in given.quantiles]
    if given.values is not None:
        changed["values"] = [factor * value for value in given.values]
    if given.mixture is not None:
        changed["mixture"] = [MixturePart(share=part.share, of=scaled(part.of, factor)) for part in given.mixture]
    return given.model_copy(update=changed)


def predict(calibrated: Scenario, setting: Setting, seeds: int) -> float:
    """Seconds a step, by simulation."""
    workloads = {
        name: work.model_copy(update={key: scaled(getattr(work, key), setting.slower) for key in ("reset", "step")})
        for name, work in calibrated.simulate.workloads.items()
    }
    scenario = calibrated.model_copy(
        update={
            "rollout": type(calibrated.rollout)(**setting.rollout),
            "environments": calibrated.environments.model_copy(update={"processes": setting.processes}),
            "training": calibrated.training.model_copy(update={"steps": setting.steps, "batch_groups": setting.groups}),
            "simulate": calibrated.simulate.model_copy(update={"workloads": workloads, "warmup": 1, "finite": True}),
        }
    )
    return mean(simulate(scenario, seed=seed).step_s for seed in range(seeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.2, help="mean seconds of an environment step")
    parser.add_argument("--seeds", type=int, default=4, help="simulations of each setting")
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    began = time.monotonic()
    calibration, settings = CALIBRATION, {name: SETTINGS[name] for name in options.settings}
    if options.smoke:
        calibration, settings = SMOKE, {"sync": replace(SMOKE, preset="sync")}
        options.delay, options.seeds = 0.01, 1
    with scratch_folder("predict") as scratch:
        folder = options.keep or scratch
        warm = folder / "warm"
        model = warm / "model"
        if not model.exists():
            run = run_file(folder, calibration, 0.0, None)
            asyncio.run(controller.train(run, warm, resume=warm.exists(), stage="sft"))
        first = measure(folder / "calibration", calibration, options.delay, model)
        calibrated = calibrate(folder / "calibration").scenario
        section = calibrated.simulate
        print(f"calibrated: {section.engines} train {section.train} contention {section.contention}", flush=True)
        predicted = {name: predict(calibrated, setting, options.seeds) for name, setting in settings.items()}
        again = predict(calibrated, calibration, options.seeds)
        print(f"{'':32} predicted  measured  error   load", flush=True)
        print(_line("the calibrated run itself", again, first), flush=True)
        measured = {}
        for number, (name, setting) in enumerate(settings.items()):
            measured[name] = measure(folder / f"run-{number}", setting, options.delay, model)
            print(_line(name, predicted[name], measured[name]), flush=True)
    errors = {name: abs(predicted[name] / measured[name] - 1) for name in settings}
    print(
        json.dumps(
            {
                "median_error": round(median(errors.values()), 3),
                "worst_error": round(max(errors.values()), 3),
                "errors": {name: round(error, 3) for name, error in errors.items()},
                "predicted_s": {name: round(each, 3) for name, each in predicted.items()},
                "measured_s": {name: round(each, 3) for name, each in measured.items()},
                "seconds": round(time.monotonic() - began),
                "load": round(os.getloadavg()[0], 1),
                "cores": os.cpu_count(),
            }
        )
    )


def _line(name: str, predicted: float, measured: float) -> str:
    error = predicted / measured - 1
    return f"{name:32} {predicted:7.2f} s {measured:7.2f} s {error:+6.1%} {os.getloadavg()[0]:6.1f}"


if __name__ == "__main__":
    main()
