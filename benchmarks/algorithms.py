"""Held-out success of algorithms after the same number of trajectories, on three tasks and three seeds, as one table.

In one process on one core (`in_process.py`), with a tiny model that imitated clumsy players of the three tasks and
succeeds in about a third of the episodes of each; every token is one version old. An algorithm is named by what it
changes in `training.algorithm`. `broken` lists those that end below their start.
"""

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.cells import add_options, kept_cells
from benchmarks.in_process import GAMES, Player, train, warm_model
from rollart.config import TrainingConfig

SKILLS = {"frozen_lake": 0.4, "guess_number": 0.3, "column_sum": 0.9}  # of the players
TASKS = [replace(GAMES[name], skill=skill) for name, skill in SKILLS.items()]
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


def cell(
    folder: Path, algorithm: dict[str, Any], options: argparse.Namespace, before: dict[str, float], seed: int
) -> dict[str, Any]:
    """Held-out success by task after training, and the mean reward of every batch."""
    config = TrainingConfig.model_validate(
        {
            "steps": options.steps,
            "batch_groups": options.groups,
            "optimizer": "muon",
            "lr": options.lr,
            "critic": {"lr": 1e-3, "epochs": 2},
            "algorithm": {"aggregate": "group", **algorithm},
        }
    )
    made = train(folder, TASKS, config, alpha=1, seed=seed, episodes=options.episodes, before=before)
    return {"after": made.after, "rewards": [round(step["reward"], 4) for step in made.steps]}


def draw(curves: dict[str, list[list[float]]], file: Path) -> None:
    """The mean reward of the last ten batches at every step, each algorithm in a panel of its own before all others."""
    means = {name: np.array(rows).mean(0) for name, rows in curves.items() if rows}
    smooth = {name: np.convolve(row, np.full(10, 0.1), "valid") for name, row in means.items() if len(row) >= 10}
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 5, sharex=True, sharey=True)
    for panel, (name, row) in zip(panels.flat, smooth.items(), strict=False):
        for other in smooth.values():
            panel.plot(range(10, 10 + len(other)), other, color="0.85", linewidth=0.8)
        panel.plot(range(10, 10 + len(row)), row, color="C0", linewidth=1.8)
        panel.set_title(name, fontsize=8)
        panel.tick_params(labelsize=7)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("mean reward of three tasks", fontsize=8)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps of GROUPS groups x 8 trajectories")
    parser.add_argument("--groups", type=int, default=18)
    parser.add_argument("--lr", type=float, default=1.5e-3, help="of Muon, that of the quickstart")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=300, help="held-out episodes per task")
    parser.add_argument("--only", nargs="*", default=list(ALGORITHMS), choices=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--plot", type=Path, help="a picture of the curves, for example curves.png")
    parser.add_argument("--smoke", action="store_true", help="all algorithms for one step of one seed")
    add_options(parser)
    options = parser.parse_args()
    warm = 300
    if options.smoke:
        options.steps, options.seeds, options.episodes, options.groups, warm = 1, 1, 4, 3, 2
    began = time.process_time()
    table: dict[str, dict[str, float]] = {}
    with kept_cells("algorithms", options) as cells:
        place = cells.folder / f"games-{warm}-muon"
        folder = warm_model(place, TASKS, steps=warm, demonstrations=10 * warm, optimizer="muon", lr=1e-2)
        fixed = {name: getattr(options, name) for name in ("steps", "groups", "lr", "episodes")} | {"warm": warm}
        before = cells.get(lambda: Player(folder).success(TASKS, options.episodes), start=True, **fixed)
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
        curves: dict[str, list[list[float]]] = {name: [] for name in options.only}
        for seed, name in product(range(options.seeds), options.only):
            algorithm = ALGORITHMS[name]
            run = partial(cell, folder, algorithm, options, before, seed)
            if (made := cells.get(run, algorithm=algorithm, seed=seed, **fixed)) is not None:
                after = made["after"]
                rows[name].append(after)
                curves[name].append(made["rewards"])
                print(
                    f"{name:30} seed {seed}  " + "  ".join(f"{key} {value:.3f}" for key, value in after.items()),
                    flush=True,
                )
    for name, runs in rows.items():
        if runs:
            row = {game.name: round(fmean(run[game.name] for run in runs), 3) for game in TASKS}
            table[name] = {**row, "mean": round(fmean(row.values()), 3), "seeds": len(runs)}
    if options.plot is not None:
        draw(curves, options.plot)
    start = round(fmean(before.values()), 3) if before else None
    broken = [name for name, row in table.items() if start is not None and row["mean"] <= start]
    print(
        json.dumps(
            {
                "algorithms": len(table),
                "broken": broken,
                "before": before and {**before, "mean": start},
                "table": table,
                "missing": len(cells.missing),
                "cpu_seconds": round(time.process_time() - began, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
