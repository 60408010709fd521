"""What staleness costs: held-out success after the same trajectories at alpha 0, 1, 2, 4 and 8.

In one process, so every token is exactly alpha versions old (`in_process.py`). A tiny model that imitated a clumsy
player of column sums learns them by RL, at a learning rate at which alpha 0 learns well, without any correction and
with the default one. `kept_at_alpha_4` is the gain in mean success at alpha 4 with the default correction, over the
gain at alpha 0, averaged over the seeds.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean

from benchmarks.in_process import GAMES, Game, Player, train, warm_model
from rollart.config import TrainingConfig

ALPHAS: tuple[int, ...] = (0, 1, 2, 4, 8)
CORRECTIONS: dict[str, dict[str, object]] = {"none": {"correction": []}, "default": {}}
GAME = GAMES["column_sum"]


def run(
    folder: Path,
    game: Game,
    alpha: int,
    algorithm: dict[str, object],
    arguments: argparse.Namespace,
    before: dict[str, float],
) -> list[float]:
    """The gain in held-out success, for each seed."""
    config = TrainingConfig.model_validate(
        {
            "steps": arguments.steps,
            "batch_groups": arguments.groups,
            "lr": arguments.lr,
            "algorithm": {"aggregate": "group", **algorithm},
        }
    )
    gains = []
    for seed in range(arguments.seeds):
        result = train(folder, [game], config, alpha=alpha, seed=seed, episodes=arguments.episodes, before=before)
        gains.append(result.after[game.name] - result.before[game.name])
    return gains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps, of GROUPS x 8 trajectories")
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--lr", type=float, default=9e-4)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=300, help="held-out episodes before and after")
    parser.add_argument("--smoke", action="store_true", help="a few steps of one seed at alpha 0 and 2, in seconds")
    arguments = parser.parse_args()
    alphas, warm = ALPHAS, 300
    if arguments.smoke:
        arguments.steps, arguments.groups, arguments.seeds, arguments.episodes = 2, 2, 1, 8
        alphas, warm = (0, 4), 2
    table: dict[str, dict[int, list[float]]] = {name: {} for name in CORRECTIONS}
    with tempfile.TemporaryDirectory() as directory:
        folder = warm_model(Path(directory), [GAME], steps=warm, demonstrations=10 * warm)
        before = Player(folder).success([GAME], arguments.episodes)
        for alpha in alphas:
            for name, algorithm in CORRECTIONS.items():
                if alpha == 0 and name == "none":
                    continue  # nothing is stale
                table[name][alpha] = run(folder, GAME, alpha, algorithm, arguments, before=before)
                gains = ", ".join(f"{gain:+.3f}" for gain in table[name][alpha])
                print(f"alpha {alpha}, correction {name}: {gains}", flush=True)
    fresh = fmean(table["default"][0])
    kept = {
        name: {alpha: round(fmean(gains) / fresh, 3) if fresh else None for alpha, gains in row.items()}
        for name, row in table.items()
    }
    print(json.dumps({"gain_at_alpha_0": round(fresh, 4), "kept": kept, "kept_at_alpha_4": kept["default"][4]}))


if __name__ == "__main__":
    main()
