"""A solved task is not forgotten while another one goes on learning from the same parameters.

Task `count` (go on counting from the number given) starts solved. Task `dash` (answer with dashes) has to unlearn
counting, and a third of its episodes are coin flips, which give gradients for ever and teach nothing. The policy is
real, the answers are sampled from it, and batches are trained one version late.
"""

import random
from pathlib import Path
from statistics import fmean

import pytest
import torch
from tiny_models import save_tiny

from rollart.config import AlgorithmConfig, CorrectionConfig, TrainingConfig, WarmupConfig
from rollart.core.column import Column
from rollart.core.types import Batch, Example, Sample, SampleGroup
from rollart.training.checkpoint import save_checkpoint
from rollart.training.export import export_model
from rollart.training.packing import pack
from rollart.training.trainer import Trainer
from rollart.warmup.examples import batches

pytestmark = pytest.mark.slow

NUMBERS, LENGTH, DASH = 12, 6, 12
MARKS = {"count": 14, "dash": 15}
GROUPS, MEMBERS, STEPS, RATE = 4, 8, 100, 4e-3


def counted(start: int) -> list[int]:
    return [(start + offset) % NUMBERS for offset in range(LENGTH)]


def reward(task: str, start: int, answer: list[int], draw: random.Random) -> float:
    if task == "dash" and start < NUMBERS // 3:
        return float(draw.random() < 0.5)
    return float(answer == (counted(start) if task == "count" else [DASH] * LENGTH))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that counts in both tasks, and answers `dash` with dashes a third of the time."""
    root = tmp_path_factory.mktemp("forgetting")
    starts = range(NUMBERS)
    shown = [("count", counted(start), start) for start in starts] * 3
    shown += [("dash", counted(start), start) for start in starts] * 2
    shown += [("dash", [DASH] * LENGTH, start) for start in starts]
    examples = [Example([MARKS[task], start, *answer], [0, 0] + [1] * LENGTH) for task, answer, start in shown]
    options = {"vocab_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    source = save_tiny(root / "model", **options)
    trainer = Trainer(source, TrainingConfig())
    for batch in batches(examples, WarmupConfig(steps=300, batch=64, lr=5e-3), seed=0):
        trainer.imitate(batch)
    save_checkpoint(trainer, root / "checkpoint").result()
    export_model(root / "checkpoint", root / "warm")
    return root / "warm"


@torch.no_grad()
def play(
    trainer: Trainer, starts: list[tuple[str, int]], chance: torch.Generator
) -> list[tuple[list[int], list[float]]]:
    """Sample an answer to each start: whole sequences, and the logprobs of the answers."""
    rows = [[MARKS[task], start] for task, start in starts]
    logprobs: list[list[float]] = [[] for _ in rows]
    for width in range(2, 2 + LENGTH):
        packed = pack(rows, [[0] * width for _ in rows])
        model = trainer.learner.policy.model
        model.forward.__func__.tail.rows = None  # all positions, not those that were trained last
        states = model.base_model(input_ids=packed.tokens, position_ids=packed.positions, packed=packed)
        logits = model.get_output_embeddings()(states.last_hidden_state)
        scores = logits[0, width - 1 :: width].log_softmax(-1)
        tokens = torch.multinomial(scores.exp(), 1, generator=chance)
        for row, known, token, score in zip(rows, logprobs, tokens, scores.gather(1, tokens), strict=True):
            row.append(int(token))
            known.append(float(score))
    return list(zip(rows, logprobs, strict=True))


def collect(trainer: Trainer, draw: random.Random, chance: torch.Generator) -> tuple[SampleGroup, ...]:
    starts = [(task, draw.randrange(NUMBERS)) for task in MARKS for _ in range(GROUPS)]
    played = play(trainer, [start for start in starts for _ in range(MEMBERS)], chance)
    samples = [
        Sample(
            id=str(index),
            task=starts[index // MEMBERS][0],
            tokens=Column.ints(row),
            roles=Column.flags([0, 0] + [1] * LENGTH),
            logprobs=Column.floats(logprobs),
            versions=Column.ints([trainer.version] * LENGTH),
            reward=reward(*starts[index // MEMBERS], row[2:], draw),
        )
        for index, (row, logprobs) in enumerate(played)
    ]
    return tuple(
        SampleGroup(str(number), task, tuple(samples[number * MEMBERS : (number + 1) * MEMBERS]))
        for number, (task, _) in enumerate(starts)
    )


def train(folder: Path, algorithm: AlgorithmConfig, seed: int = 2) -> dict[str, list[float]]:
    """The mean reward of each task, step by step."""
    trainer = Trainer(folder, TrainingConfig(lr=RATE, algorithm=algorithm))
    draw, chance = random.Random(seed), torch.Generator().manual_seed(seed)
    waiting = collect(trainer, draw, chance)
    history: dict[str, list[float]] = {task: [] for task in MARKS}
    for step in range(STEPS):
        groups, waiting = waiting, collect(trainer, draw, chance)
        for task, row in trainer.step(Batch(step, groups)).tasks.items():
            history[task].append(row["reward"])
    return history


def test_without_the_cure_a_solved_task_is_lost_for_good(folder: Path) -> None:
    correction = CorrectionConfig(use=("token",))  # the mask of the default makes it slower
    history = train(folder, AlgorithmConfig(solved_advantage=0.0, evidence_power=0.0, correction=correction))
    assert fmean(history["count"][:3]) > 0.95
    assert fmean(history["count"][-20:]) < 0.2


def test_by_default_a_solved_task_stays_solved_while_the_other_is_learnt(folder: Path) -> None:
    history = train(folder, AlgorithmConfig())
    assert fmean(history["count"][:3]) > 0.95
    assert fmean(history["count"][-20:]) > 0.85
    # all that can be learnt of it: two thirds of its episodes, and half of the coin flips
    assert fmean(history["dash"][-20:]) > 0.75 > fmean(history["dash"][:3])
