"""Credit by turn against credit by episode, on a task of several turns with rewards within the episode.

In one process on one core (`in_process.py`), every token one version old. The task is a row of doors: each turn shows
two numbers, naming the larger opens the door, and an open door is rewarded at once. No turn depends on another, so an
estimator that gives every turn the advantage of its episode trains each action on the luck of the others: of n doors,
an action's own reward is 1/n of the variance of what it is trained on. Doors are the same for all members of a group,
whatever they did: states come back, as `gigpo` needs. The start is a model that learnt to name one of the two, no more.
`doors` is the mean share of doors opened in held-out episodes, over the seeds; `gain` is that less the share of `grpo`,
seed by seed, with its 95% interval.
"""

import argparse
import json
import random
import time
from functools import partial
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.cells import add_options, kept_cells
from benchmarks.in_process import Game, Player, train, warm_model
from rollart.config import TrainingConfig
from rollart.simulator.result import interval

DOORS = 14
DISCOUNT = 0.3  # of later doors, which an action does not change
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "turn_returns": {"advantage": "turn_returns", "discount": DISCOUNT},
    "gigpo": {"advantage": "gigpo", "discount": DISCOUNT},
}


class Doors:
    """1 / DOORS for each that is opened; success is all of them."""

    def __init__(self, held_out: bool = False) -> None:
        self.shown: list[tuple[int, int]] = []
        self.turn = self.opened = 0

    def reset(self, seed: int) -> str:
        rng = random.Random(f"doors {seed}")
        self.shown = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(DOORS)]
        self.turn = self.opened = 0
        return self._text()

    def step(self, action: str) -> dict[str, Any]:
        right = action.strip() == str(max(self.shown[self.turn]))
        self.opened += right
        self.turn += 1
        over = self.turn == DOORS
        info = {"success": self.opened == DOORS} if over else {}
        return {"messages": "" if over else self._text(), "reward": right / DOORS, "done": over, "info": info}

    def _text(self) -> str:
        return "{} {}".format(*self.shown[self.turn])


def player(env: Doors, rng: random.Random, *, skill: float) -> str:
    """With probability `skill` the larger number, otherwise one of the two."""
    numbers = env.shown[env.turn]
    return str(max(numbers) if rng.random() < skill else rng.choice(numbers))


GAME = Game("doors", Doors, player, skill=0.0, turns=DOORS, tokens=4, context=500)


def cell(folder: Path, algorithm: dict[str, Any], options: argparse.Namespace, seed: int) -> float:
    """The share of doors opened in held-out episodes after training."""
    config = TrainingConfig.model_validate(
        {
            "steps": options.steps,
            "batch_groups": options.groups,
            "lr": options.lr,
            "algorithm": {"aggregate": "group", **algorithm},
        }
    )
    run = train(folder, [GAME], config, alpha=1, seed=seed, episodes=options.episodes, before={})
    return run.rewards[GAME.name]


def summary(gains: list[float]) -> dict[str, Any]:
    """The mean gain, and its 95% interval by Student's t."""
    mean, half = interval(gains)
    ends = None if isnan(half) else [round(mean - half, 3), round(mean + half, 3)]
    return {"mean": round(mean, 3), "interval": ends}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="training steps of GROUPS x 8 trajectories")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--lr", type=float, default=4.5e-4)
    parser.add_argument("--warm", type=int, default=120, help="supervised steps on the player who guesses")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=150, help="held out")
    parser.add_argument("--smoke", action="store_true", help="one step of one seed")
    add_options(parser)
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seeds, options.episodes, options.groups, options.warm = 1, 1, 4, 2, 2
    began, shares = time.process_time(), {}
    with kept_cells("turn_credit", options) as cells:
        folder = warm_model(
            cells.folder / f"doors-{options.warm}", [GAME], steps=options.warm, demonstrations=5 * options.warm
        )
        fixed = {name: getattr(options, name) for name in ("steps", "groups", "lr", "warm", "episodes")}
        start = cells.get(lambda: Player(folder).held_out([GAME], options.episodes)[1][GAME.name], start=True, **fixed)
        for name, algorithm in ALGORITHMS.items():
            runs = [
                cells.get(partial(cell, folder, algorithm, options, seed), algorithm=algorithm, seed=seed, **fixed)
                for seed in range(options.seeds)
            ]
            if None not in runs:
                shares[name] = runs
                print(f"{name:14}" + " ".join(f"{share:.3f}" for share in runs), flush=True)
    result = {
        "start": None if start is None else round(start, 3),
        "doors": {name: round(fmean(row), 3) for name, row in shares.items()},
        "gain": {
            name: summary([one - other for one, other in zip(row, shares["grpo"], strict=True)])
            for name, row in shares.items()
            if name != "grpo"
        },
        "missing": len(cells.missing),
        "cpu_seconds": round(time.process_time() - began, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
