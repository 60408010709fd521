"""What staleness costs: held-out success after the same trajectories at alpha 0, 1, 2, 4 and 8.

In one process, so every token is exactly alpha versions old (`in_process.py`). A tiny model that imitated a clumsy
player of column sums learns them by RL, at a learning rate at which alpha 0 learns well, without any correction and
with the default one. `kept_at_alpha_4` is the gain in mean success at alpha 4 with the default correction, over the
gain at alpha 0, averaged over the seeds.
"""

import argparse
import json
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.cells import add_options, kept_cells
from benchmarks.in_process import GAMES, Player, train, warm_model
from rollart.config import TrainingConfig

ALPHAS: tuple[int, ...] = (0, 1, 2, 4, 8)
CORRECTIONS: dict[str, dict[str, object]] = {"none": {"correction": []}, "default": {}}
GAME = GAMES["column_sum"]


def gain(
    folder: Path, algorithm: dict[str, object], options: argparse.Namespace, before: float, *, alpha: int, seed: int
) -> float:
    """In held-out success."""
    config = TrainingConfig.model_validate(
        {
            "steps": options.steps,
            "batch_groups": options.groups,
            "lr": options.lr,
            "algorithm": {"aggregate": "group", **algorithm},
        }
    )
    known = {GAME.name: before}
    result = train(folder, [GAME], config, alpha=alpha, seed=seed, episodes=options.episodes, before=known)
    return result.after[GAME.name] - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps, of GROUPS x 8 trajectories")
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--lr", type=float, default=9e-4)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=1500, help="held-out episodes before and after")
    parser.add_argument("--alphas", type=int, nargs="*", default=ALPHAS)
    parser.add_argument("--corrections", nargs="*", default=list(CORRECTIONS), choices=list(CORRECTIONS))
    parser.add_argument("--smoke", action="store_true", help="a few steps of one seed at alpha 0 and 4, in seconds")
    add_options(parser)
    options = parser.parse_args()
    warm = 300
    if options.smoke:
        options.steps, options.groups, options.seeds, options.episodes = 2, 2, 1, 8
        options.alphas, warm = (0, 4), 2
    table: dict[str, dict[int, list[float]]] = {name: {} for name in options.corrections}
    with kept_cells("staleness", options) as cells:
        folder = warm_model(cells.folder / f"{GAME.name}-{warm}", [GAME], steps=warm, demonstrations=10 * warm)
        fixed = {name: getattr(options, name) for name in ("steps", "groups", "lr", "episodes")} | {"warm": warm}
        before = cells.get(lambda: Player(folder).success([GAME], options.episodes)[GAME.name], start=True, **fixed)
        for alpha, name in product(options.alphas, options.corrections):
            if alpha == 0 and name == "none":
                continue  # nothing is stale
            algorithm = CORRECTIONS[name]
            rows = [
                cells.get(
                    partial(gain, folder, algorithm, options, before, alpha=alpha, seed=seed),
                    algorithm=algorithm,
                    alpha=alpha,
                    seed=seed,
                    **fixed,
                )
                for seed in range(options.seeds)
            ]
            table[name][alpha] = [row for row in rows if row is not None]
            gains = ", ".join(f"{row:+.3f}" for row in table[name][alpha])
            print(f"alpha {alpha}, correction {name}: {gains}", flush=True)
    print(json.dumps({"start": before, **summary(table), "missing": len(cells.missing)}))


def summary(table: dict[str, dict[int, list[float]]]) -> dict[str, Any]:
    """Gains over that of fresh data, for the seeds that both have."""
    fresh = table.get("default", {}).get(0, [])
    kept: dict[str, dict[int, float]] = {name: {} for name in table}
    for name, row in table.items():
        for alpha, gains in row.items():
            if (both := min(len(gains), len(fresh))) and (base := sum(fresh[:both])):
                kept[name][alpha] = round(sum(gains[:both]) / base, 3)
    return {
        "gain_at_alpha_0": round(fmean(fresh), 4) if fresh else None,
        "gains": {
            name: {alpha: [round(one, 3) for one in gains] for alpha, gains in row.items()}
            for name, row in table.items()
        },
        "kept": kept,
        "kept_at_alpha_4": kept.get("default", {}).get(4),
    }


if __name__ == "__main__":
    main()
