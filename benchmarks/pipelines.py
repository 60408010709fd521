"""Held-out success of the pipelines beside RL: SFT and DPO on made data, and distillation against its teacher's RL.

In one process on one core (`in_process.py`), on one task, from a tiny model that imitated a clumsy player. The data is
made by that model itself: SFT imitates its successes, DPO learns pairs of its attempts by reward. Then RL trains a
teacher, and a student learns from it on-policy until it succeeds as often, within `TOLERANCE`: from the teacher's
likeliest tokens, with several updates of a batch and a falling learning rate (`--distill jensen_shannon`, which we
recommend, `reverse_kl`, `forward_kl`), or from the logprob of each sampled token (`opd`). `distill_share` is the
trajectories of the student by the recommended way over those that RL took for that.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cells import add_options, kept_cells
from benchmarks.in_process import GAMES, HELD_OUT, Game, Player, warm_model
from rollart.config import TrainingConfig, WarmupConfig
from rollart.config.algorithm import TOP_LOSSES
from rollart.core.column import Column
from rollart.core.teaching import ScoreRequest
from rollart.core.types import Batch, Example, Sample, SampleGroup, Trajectory
from rollart.rollout.samples import samples
from rollart.training.checkpoint import save_checkpoint
from rollart.training.export import export_model
from rollart.training.scorer import Scorer, TeacherModel
from rollart.training.trainer import Trainer
from rollart.warmup.examples import batches, shuffled

TOLERANCE = 0.02
RECOMMENDED = "jensen_shannon"
GROUPS, MEMBERS = 12, 8
Teach = Callable[[Sample], Sample]
Curve = list[tuple[int, float]]  # trajectories and held-out success


def config(steps: int, lr: float, **algorithm: object) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {"steps": steps, "batch_groups": GROUPS, "group_size": MEMBERS, "lr": lr, "algorithm": algorithm}
    )


def success(folder: Path, trainer: Trainer, game: Game, episodes: int) -> float:
    player = Player(folder)
    player.load(trainer)
    return player.success([game], episodes)[game.name]


def sft(folder: Path, game: Game, made: list[Trajectory], steps: int, episodes: int) -> float:
    """Imitates the successes."""
    good = [sample for one in made if one.success for sample in samples(one)]
    examples = [Example(sample.tokens.array.tolist(), sample.mask.astype(int).tolist()) for sample in good]
    trainer = Trainer(folder, TrainingConfig())
    for batch in batches(examples, WarmupConfig(steps=steps, batch=48, lr=1e-3), seed=0):
        trainer.imitate(batch)
    return success(folder, trainer, game, episodes)


def dpo(folder: Path, game: Game, made: list[Trajectory], options: argparse.Namespace) -> float:
    """The best attempt at an episode against the worst, and so on, as `rollart dpo` pairs them."""
    by_episode: dict[str, list[Trajectory]] = {}
    for one in made:
        by_episode.setdefault(one.group, []).append(one)
    pairs = []
    for attempts in by_episode.values():
        order = sorted(attempts, key=lambda one: -(one.reward or 0.0))
        outside_in = list(zip(order, reversed(order), strict=True))[: len(order) // 2]
        pairs += [(best, worst) for best, worst in outside_in if (best.reward or 0.0) > (worst.reward or 0.0)]
    own = {"loss": "dpo", "beta": 0.1, "aggregate": "sequence", "evidence_power": 0.0}
    trainer, drawn = Trainer(folder, config(options.dpo_steps, options.dpo_lr, **own)), shuffled(len(pairs), 48, 0)
    for step in range(options.dpo_steps):
        trainer.step(Batch(step, tuple(_pair(step, number, *pairs[number]) for number in next(drawn))))
    return success(folder, trainer, game, options.episodes)


def _pair(step: int, number: int, best: Trajectory, worst: Trajectory) -> SampleGroup:
    both = [replace(samples(one)[0], reward=reward) for one, reward in ((best, 1.0), (worst, 0.0))]
    own = tuple(replace(one, versions=Column.ints([step] * one.actions)) for one in both)
    return SampleGroup(str(number), "pairs", own)


def curve(
    folder: Path, game: Game, trainer: Trainer, episodes: int, every: int, teach: Teach | None = None
) -> Iterator[tuple[int, float]]:
    """Trajectories and held-out success, every few steps of on-policy training."""
    player, draw = Player(folder), random.Random("pipelines")
    for step in range(trainer.config.steps):
        groups = player.groups([(game, draw.randrange(HELD_OUT)) for _ in range(GROUPS)], MEMBERS)
        if teach is not None:
            groups = tuple(replace(group, samples=tuple(map(teach, group.samples))) for group in groups)
        trainer.step(Batch(step, groups))
        player.load(trainer)
        if (step + 1) % every == 0:
            yield (step + 1) * GROUPS * MEMBERS, player.success([game], episodes)[game.name]


def student_of(folder: Path, loss: str, steps: int, lr: float) -> Trainer:
    if loss not in TOP_LOSSES:
        return Trainer(folder, config(steps, 4.5e-4, advantage="opd", aggregate="group"))
    dense = config(steps, lr, advantage="opd", loss=loss, aggregate="group")
    several = {"updates": 4, "epochs": 2, "lr_schedule": "linear", "lr_end": 0.1}
    return Trainer(folder, dense.model_copy(update=several))


def teacher_of(folder: Path, count: int) -> Teach:
    policy = TeacherModel(folder)
    scorer = Scorer(policy, next(policy.model.parameters()).device)

    def teach(sample: Sample) -> Sample:
        request = ScoreRequest(sample.tokens, Column.flags(sample.mask), sample.temperature, count)
        return replace(sample, teacher=scorer.score_all([request])[0])

    return teach


def first_at(points: Curve, goal: float) -> int | None:
    return next((trajectories for trajectories, found in points if found >= goal), None)


def made_by(folder: Path, game: Game, episodes: int) -> list[Trajectory]:
    plan = [(game, seed, f"{game.name}-{seed}", member) for seed in range(episodes) for member in range(MEMBERS)]
    return Player(folder).play(plan)


def improved(folder: Path, game: Game, options: argparse.Namespace) -> dict[str, float]:
    """Held-out success of the start, and of what it learns from its own attempts."""
    found = {"start": Player(folder).success([game], options.episodes)[game.name]}
    made = made_by(folder, game, options.sampled)
    if any(one.success for one in made):
        found["sft"] = sft(folder, game, made, options.sft_steps, options.episodes)
    if len({one.reward for one in made}) > 1:
        found["dpo"] = dpo(folder, game, made, options)
    return found


def taught_by_rewards(folder: Path, game: Game, options: argparse.Namespace, teacher: Path) -> Curve:
    """The curve of RL, whose last policy is left in `teacher`."""
    trainer = Trainer(folder, config(options.rl_steps, options.lr, aggregate="group"))
    points = list(curve(folder, game, trainer, options.episodes, options.every))
    checkpoint = teacher.with_name(f"{teacher.name}-checkpoint")
    save_checkpoint(trainer, checkpoint).result()
    export_model(checkpoint, teacher)
    return points


def taught_by_model(folder: Path, game: Game, options: argparse.Namespace, teacher: Path, loss: str) -> Curve:
    student = student_of(folder, loss, options.distill_steps, options.distill_lr)
    teach = teacher_of(teacher, student.config.algorithm.likeliest)
    return list(curve(folder, game, student, options.episodes, options.distill_every, teach))


def shares(rl: Curve, taught: dict[str, Curve]) -> dict[str, Any]:
    """Trajectories until the teacher's success, less `TOLERANCE`, by RL and by each way to distil."""
    goal = rl[-1][1] - TOLERANCE
    by_rl = first_at(rl, goal)
    by_teacher = {loss: first_at(points, goal) for loss, points in taught.items()}
    share = {loss: round(count / by_rl, 3) if by_rl and count else None for loss, count in by_teacher.items()}
    return {
        "teacher": round(rl[-1][1], 3),
        "student": {loss: round(points[-1][1], 3) for loss, points in taught.items()},
        "rl_trajectories": by_rl,
        "distill_trajectories": by_teacher,
        "distill_shares": share,
        "distill_share": share.get(RECOMMENDED),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="frozen_lake", choices=list(GAMES))
    parser.add_argument("--rl-steps", type=int, default=60, help=f"of {GROUPS} groups x {MEMBERS} trajectories")
    parser.add_argument("--lr", type=float, default=4.5e-4, help="of RL")
    parser.add_argument("--distill-steps", type=int, default=15)
    parser.add_argument("--distill-lr", type=float, default=1e-3, help="with likeliest tokens; it falls to a tenth")
    parser.add_argument(
        "--distill", nargs="*", default=[RECOMMENDED, "reverse_kl", "opd"], choices=["opd", *TOP_LOSSES]
    )
    parser.add_argument("--every", type=int, default=3, help="steps of RL between evaluations")
    parser.add_argument("--distill-every", type=int, default=3, help="steps of distillation between evaluations")
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--dpo-steps", type=int, default=30)
    parser.add_argument("--dpo-lr", type=float, default=1e-4)
    parser.add_argument("--sampled", type=int, default=300, help=f"episodes, {MEMBERS} attempts at each")
    parser.add_argument("--episodes", type=int, default=1000, help="held out")
    parser.add_argument("--smoke", action="store_true", help="a step of each")
    add_options(parser)
    options = parser.parse_args()
    warm = 300
    if options.smoke:
        options.rl_steps = options.distill_steps = options.sft_steps = options.dpo_steps = 1
        options.every = options.distill_every = 1
        options.sampled, options.episodes, warm = 4, 4, 2
    game, began = GAMES[options.game], time.process_time()
    with kept_cells("pipelines", options) as cells:
        folder = warm_model(cells.folder / f"{game.name}-{warm}", [game], steps=warm, demonstrations=10 * warm)
        fixed = {"game": game.name, "warm": warm, "episodes": options.episodes}
        own = {name: getattr(options, name) for name in ("sampled", "sft_steps", "dpo_steps", "dpo_lr")}
        found = cells.get(lambda: improved(folder, game, options), stage="own data", **own, **fixed)
        print(json.dumps(found), flush=True)
        teacher = cells.folder / f"teacher-{game.name}-{warm}-{options.rl_steps}-{options.lr}"
        by = {"rl_steps": options.rl_steps, "lr": options.lr, "every": options.every, **fixed}
        rl = cells.get(lambda: taught_by_rewards(folder, game, options, teacher), stage="rl", **by)
        print("rl", rl, flush=True)
        taught = {}
        for loss in options.distill:
            run = partial(taught_by_model, folder, game, options, teacher, loss)
            own = {name: getattr(options, name) for name in ("distill_steps", "distill_lr", "distill_every")}
            points = cells.get(run, stage="distill", loss=loss, **own, **by)
            print(loss, points, flush=True)
            if points is not None:
                taught[loss] = points
    result = {
        **{name: round(value, 3) for name, value in (found or {}).items()},
        **(shares(rl, taught) if rl else {}),
        "curves": {"rl": rl, **taught},
        "missing": len(cells.missing),
        "cpu_seconds": round(time.process_time() - began, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
