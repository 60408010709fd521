"""Credit by turn against credit by episode, on a task of several turns with rewards within the episode.

In one process on one core (`in_process.py`), every token one version old. The task is a row of doors: each turn shows
two numbers, naming the larger opens the door, and an open door is rewarded at once. No turn depends on another, so an
estimator that gives every turn the advantage of its episode trains each action on the luck of the others. Doors are the
same for all members of a group, whatever they did: states come back, as `gigpo` needs. `doors` is the mean share of
doors opened in held-out episodes, over the seeds; `gain` is that less the share of `grpo`, with its standard error.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.in_process import Game, train, warm_model
from rollart.config import TrainingConfig

DOORS = 6
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


GAME = Game("doors", Doors, player, skill=0.1, turns=DOORS, tokens=4, context=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="training steps of 8 groups x 8 trajectories")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=150, help="held out")
    parser.add_argument("--smoke", action="store_true", help="one step of one seed")
    arguments = parser.parse_args()
    groups, warm = 8, 200
    if arguments.smoke:
        arguments.steps, arguments.seeds, arguments.episodes, groups, warm = 1, 1, 4, 2, 2
    began, shares = time.process_time(), {}
    with tempfile.TemporaryDirectory() as directory:
        folder = warm_model(Path(directory), [GAME], steps=warm, demonstrations=5 * warm)
        for name, algorithm in ALGORITHMS.items():
            config = TrainingConfig.model_validate(
                {
                    "steps": arguments.steps,
                    "batch_groups": groups,
                    "lr": 4.5e-4,
                    "algorithm": {"aggregate": "group", **algorithm},
                }
            )
            runs = [
                train(folder, [GAME], config, alpha=1, seed=seed, episodes=arguments.episodes)
                for seed in range(arguments.seeds)
            ]
            shares[name] = [run.rewards[GAME.name] for run in runs]
            print(f"{name:14}" + " ".join(f"{share:.3f}" for share in shares[name]), flush=True)
    result: dict[str, Any] = {"doors": {name: round(fmean(row), 3) for name, row in shares.items()}, "gain": {}}
    for name in ("turn_returns", "gigpo"):
        gains = [one - other for one, other in zip(shares[name], shares["grpo"], strict=True)]
        error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None
        result["gain"][name] = [round(fmean(gains), 3), None if error is None else round(error, 3)]
    print(json.dumps({**result, "cpu_seconds": round(time.process_time() - began, 1)}))


if __name__ == "__main__":
    main()
