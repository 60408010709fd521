"""Held-out success of the pipelines beside RL: SFT and DPO on made data, and distillation against its teacher's RL.

In one process on one core (`in_process.py`), on one task, from a tiny model that imitated a clumsy player. The data is
made by that model itself: SFT imitates its successes, DPO learns pairs of its attempts by reward. Then RL trains a
teacher, and a student learns from it on-policy until it succeeds as often, within `TOLERANCE`: from the logprob of each
sampled token (`--distill opd`), or with several updates of a batch from the teacher's likeliest tokens (`reverse_kl`,
`forward_kl`, `jensen_shannon`). `distill_share` is the trajectories of the student over those that RL took for that.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

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
GROUPS, MEMBERS = 12, 8
Teach = Callable[[Sample], Sample]


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


def dpo(folder: Path, game: Game, made: list[Trajectory], steps: int, episodes: int) -> float:
    """The best attempt at an episode against the worst, and so on, as `rollart dpo` pairs them."""
    by_episode: dict[str, list[Trajectory]] = {}
    for one in made:
        by_episode.setdefault(one.group, []).append(one)
    pairs = []
    for attempts in by_episode.values():
        order = sorted(attempts, key=lambda one: -(one.reward or 0.0))
        outside_in = list(zip(order, reversed(order), strict=True))[: len(order) // 2]
        pairs += [(best, worst) for best, worst in outside_in if (best.reward or 0.0) > (worst.reward or 0.0)]
    trainer = Trainer(folder, config(steps, 3e-4, loss="dpo", beta=0.1, aggregate="sequence", evidence_power=0.0))
    drawn = shuffled(len(pairs), 48, 0)
    for step in range(steps):
        trainer.step(Batch(step, tuple(_pair(step, number, *pairs[number]) for number in next(drawn))))
    return success(folder, trainer, game, episodes)


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


def student_of(folder: Path, loss: str, steps: int) -> Trainer:
    if loss not in TOP_LOSSES:
        return Trainer(folder, config(steps, 4.5e-4, advantage="opd", aggregate="group"))
    dense = config(steps, 1e-3, advantage="opd", loss=loss, aggregate="group")
    return Trainer(folder, dense.model_copy(update={"updates": 4, "epochs": 2}))


def teacher_of(folder: Path, count: int) -> Teach:
    policy = TeacherModel(folder)
    scorer = Scorer(policy, next(policy.model.parameters()).device)

    def teach(sample: Sample) -> Sample:
        request = ScoreRequest(sample.tokens, Column.flags(sample.mask), sample.temperature, count)
        return replace(sample, teacher=scorer.score_all([request])[0])

    return teach


def first_at(points: list[tuple[int, float]], goal: float) -> int | None:
    return next((trajectories for trajectories, found in points if found >= goal), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="frozen_lake", choices=list(GAMES))
    parser.add_argument("--rl-steps", type=int, default=60, help=f"of {GROUPS} groups x {MEMBERS} trajectories")
    parser.add_argument("--distill-steps", type=int, default=30)
    parser.add_argument("--distill", default="opd", choices=["opd", *TOP_LOSSES], help="what the student learns by")
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--dpo-steps", type=int, default=30)
    parser.add_argument("--sampled", type=int, default=300, help=f"episodes, {MEMBERS} attempts at each")
    parser.add_argument("--episodes", type=int, default=300, help="held out")
    parser.add_argument("--smoke", action="store_true", help="a step of each")
    options = parser.parse_args()
    warm = 300
    if options.smoke:
        options.rl_steps = options.distill_steps = options.sft_steps = options.dpo_steps = 1
        options.sampled, options.episodes, warm = 4, 4, 2
    every, began = 1 if options.smoke else 3, time.process_time()
    game, found = GAMES[options.game], {}
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        folder = warm_model(scratch, [game], steps=warm, demonstrations=10 * warm)
        player = Player(folder)
        found["start"] = player.success([game], options.episodes)[game.name]
        plan = [
            (game, seed, f"{game.name}-{seed}", member) for seed in range(options.sampled) for member in range(MEMBERS)
        ]
        made = player.play(plan)
        if any(one.success for one in made):
            found["sft"] = sft(folder, game, made, options.sft_steps, options.episodes)
        if len({one.reward for one in made}) > 1:
            found["dpo"] = dpo(folder, game, made, options.dpo_steps, options.episodes)
        print(json.dumps(found), flush=True)
        trainer = Trainer(folder, config(options.rl_steps, 4.5e-4, aggregate="group"))
        rl = list(curve(folder, game, trainer, options.episodes, every))
        print("rl", rl, flush=True)
        save_checkpoint(trainer, scratch / "teacher-checkpoint").result()
        export_model(scratch / "teacher-checkpoint", scratch / "teacher")
        student = student_of(folder, options.distill, options.distill_steps)
        teach = teacher_of(scratch / "teacher", student.config.algorithm.likeliest)
        taught = list(curve(folder, game, student, options.episodes, every, teach))
        print(options.distill, taught, flush=True)
    goal = rl[-1][1] - TOLERANCE
    by_rl, by_teacher = first_at(rl, goal), first_at(taught, goal)
    share = round(by_teacher / by_rl, 3) if by_rl and by_teacher else None
    result = {
        **{name: round(value, 3) for name, value in found.items()},
        "teacher": round(rl[-1][1], 3),
        "student": round(taught[-1][1], 3),
        "rl_trajectories": by_rl,
        "distill_trajectories": by_teacher,
        "distill_share": share,
        "curves": {"rl": rl, "distill": taught},
        "cpu_seconds": round(time.process_time() - began, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
