"""Held-out success of algorithms after the same number of trajectories, on three tasks and three seeds, as one table.

In one process on one core (`in_process.py`), with a tiny model that imitated clumsy players of the three tasks; every
token is one version old. An algorithm is named by what it changes in `training.algorithm`. `broken` lists those that
end below their start.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.in_process import GAMES, Player, train, warm_model
from rollart.config import TrainingConfig

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo + ppo": {},
    "dr_grpo + ppo": {"advantage": "dr_grpo"},
    "rloo + reinforce": {"advantage": "rloo", "loss": "reinforce"},
    "reinforce_pp + ppo": {"advantage": "reinforce_pp"},
    "reinforce_pp_baseline + ppo": {"advantage": "reinforce_pp_baseline"},
    "maxrl + ppo": {"advantage": "maxrl"},
    "turn_returns + ppo": {"advantage": "turn_returns"},
    "gigpo + ppo": {"advantage": "gigpo"},
    "gae + ppo": {"advantage": "gae", "normalise": "task"},
    "grpo + gspo": {"loss": "gspo"},
    "grpo + cispo": {"loss": "cispo"},
    "grpo + sapo": {"loss": "sapo"},
    "grpo + topr": {"loss": "topr"},
    "grpo + raft_pp": {"loss": "raft_pp"},
    "grpo + squared": {"loss": "squared"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16, help="training steps of 9 groups x 8 trajectories")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=100, help="held-out episodes per task")
    parser.add_argument("--only", nargs="*", default=list(ALGORITHMS), help="names of algorithms")
    parser.add_argument("--smoke", action="store_true", help="all algorithms for one step of one seed")
    arguments = parser.parse_args()
    groups, warm = 9, 300
    if arguments.smoke:
        arguments.steps, arguments.seeds, arguments.episodes, groups, warm = 1, 1, 4, 3, 2
    games, began = list(GAMES.values()), time.process_time()
    table: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = warm_model(Path(directory), games, steps=warm, demonstrations=10 * warm)
        before = Player(folder).success(games, arguments.episodes)
        for name in arguments.only:
            config = TrainingConfig.model_validate(
                {
                    "steps": arguments.steps,
                    "batch_groups": groups,
                    "lr": 4.5e-4,
                    "critic": {"lr": 1e-3, "epochs": 2},
                    "algorithm": {"aggregate": "group", **ALGORITHMS[name]},
                }
            )
            runs = [
                train(folder, games, config, alpha=1, seed=seed, episodes=arguments.episodes, before=before)
                for seed in range(arguments.seeds)
            ]
            row = {game.name: round(fmean(run.after[game.name] for run in runs), 3) for game in games}
            start, after = fmean(before.values()), fmean(row.values())
            table[name] = {**row, "mean": round(after, 3), "before": round(start, 3)}
            print(f"{name:30} " + "  ".join(f"{key} {value:.3f}" for key, value in table[name].items()), flush=True)
    broken = [name for name, row in table.items() if row["mean"] <= row["before"]]
    cpu = round(time.process_time() - began, 1)
    print(json.dumps({"algorithms": len(table), "broken": broken, "cpu_seconds": cpu, "table": table}))


if __name__ == "__main__":
    main()
