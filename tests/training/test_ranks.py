import math
from functools import partial
from pathlib import Path

import pytest
import torch
from forked_ranks import on_ranks
from rank_processes import free_address
from tiny_models import make_batch, save_tiny

from rollart.config import AlgorithmConfig, ParallelConfig, TrainingConfig
from rollart.core.errors import RollartError
from rollart.core.types import Batch, StepMetrics
from rollart.training.checkpoint import load_checkpoint, save_checkpoint
from rollart.training.ranks import RankAddress, Ranks
from rollart.training.trainer import Trainer

REWARDS = [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0]]
POISONED = [[math.inf, 0.0], [1.0, 0.0], [0.0, 1.0]]
TOLERANCE = 1e-4
Weights = dict[str, torch.Tensor]


def distance(left: Weights, right: Weights) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


def same(left: StepMetrics, right: StepMetrics) -> bool:
    sizes = [[size for gap in metrics.gaps for size in (gap.mean, gap.max)] for metrics in (left, right)]
    names = [[(gap.task, gap.age, gap.tokens) for gap in metrics.gaps] for metrics in (left, right)]
    assert names[0] == names[1] and sizes[0] == pytest.approx(sizes[1], abs=TOLERANCE)
    assert left.values == pytest.approx(right.values, abs=TOLERANCE) and left.tasks.keys() == right.tasks.keys()
    return all(left.tasks[task] == pytest.approx(right.tasks[task], abs=TOLERANCE) for task in left.tasks)


def learn(batches: list[Batch], trainer: Trainer) -> tuple[list[StepMetrics], Weights]:
    return [trainer.step(batch) for batch in batches], trainer.snapshot()[1]


def go_on(source: Path, target: Path, batch: Batch, trainer: Trainer) -> StepMetrics:
    load_checkpoint(trainer, source)
    metrics = trainer.step(batch)
    save_checkpoint(trainer, target).result()
    with pytest.raises(RollartError, match="does not exist"):
        load_checkpoint(trainer, source / "nothing")
    return metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "architecture", "config"),
    [
        (2, "qwen3", TrainingConfig(epochs=2, pack_tokens=64, algorithm=AlgorithmConfig(kl=0.05, entropy=0.01))),
        (
            2,
            "qwen3_moe",
            TrainingConfig(lr=1e-2, algorithm=AlgorithmConfig(loss="gspo", advantage="rloo", aggregate="sequence")),
        ),
        (3, "llama", TrainingConfig(weight_decay=0.1, algorithm=AlgorithmConfig(loss="cispo", aggregate="group"))),
        (
            2,
            "qwen3",
            TrainingConfig(grad_clip=0.01, algorithm=AlgorithmConfig(loss="reinforce", advantage="reinforce_pp")),
        ),
    ],
    ids=["ppo", "gspo", "cispo", "reinforce"],
)
def test_several_ranks_learn_what_one_learns(
    tmp_path: Path, ranks: int, architecture: str, config: TrainingConfig
) -> None:
    """The last batch has a single sample to train: fewer than there are ranks."""
    save_tiny(tmp_path, architecture, tie_word_embeddings=architecture != "llama")
    batches = [make_batch(step, REWARDS, seed=step) for step in range(3)] + [make_batch(3, [[1.0, 0.5], [0.0]])]
    expected, weights = learn(batches, Trainer(tmp_path, config))
    got, spread = on_ranks(ranks, tmp_path, config, partial(learn, batches))
    assert all(same(left, right) for left, right in zip(got, expected, strict=True))
    assert distance(spread, weights) < TOLERANCE


@pytest.mark.slow
def test_a_checkpoint_loads_at_another_number_of_ranks(tmp_path: Path) -> None:
    """From one rank to two, to three, and back to one; beside it, one rank that never stops."""
    config = TrainingConfig(algorithm=AlgorithmConfig(kl=0.05))
    folder = save_tiny(tmp_path / "model")
    paths = [tmp_path / f"step-{step}" for step in range(4)]
    batches = [make_batch(step, REWARDS, seed=step) for step in range(4)]
    alone = Trainer(folder, config)
    alone.step(batches[0])
    save_checkpoint(alone, paths[1]).result()
    for version, ranks in ((1, 2), (2, 3)):
        work = partial(go_on, paths[version], paths[version + 1], batches[version])
        assert same(on_ranks(ranks, folder, config, work), alone.step(batches[version]))
    resumed = Trainer(folder, config)
    load_checkpoint(resumed, paths[3])
    assert same(resumed.step(batches[3]), alone.step(batches[3]))
    assert distance(resumed.snapshot()[1], alone.snapshot()[1]) < TOLERANCE
    assert [len([*path.glob("rank-*")]) for path in paths[1:]] == [1, 2, 3]


@pytest.mark.slow
def test_what_is_not_finite_on_one_rank_is_skipped_by_all(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    batches = [make_batch(0, POISONED), make_batch(1, [[1.0, 0.0]]), make_batch(2, POISONED)]
    metrics, weights = on_ranks(2, tmp_path, TrainingConfig(), partial(learn, batches))
    assert [step.values["skipped"] for step in metrics] == [1.0, 0.0, 1.0]
    alone = Trainer(tmp_path, TrainingConfig(), version=1)
    alone.step(batches[1])
    assert distance(weights, alone.snapshot()[1]) < TOLERANCE


def destinations(batch: Batch, trainer: Trainer) -> list[int]:
    """To which ranks rank 0 sends parts of a batch."""
    sent, send = set(), torch.distributed.isend

    def counted(body: torch.Tensor, rank: int, group: object) -> object:
        sent.add(rank)
        return send(body, rank, group)

    torch.distributed.isend = counted
    try:
        trainer.step(batch)
    finally:
        torch.distributed.isend = send
    return sorted(sent)


@pytest.mark.slow
def test_a_batch_leaves_rank_0_once_and_is_passed_on_by_those_who_share_it(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = TrainingConfig(parallel=ParallelConfig(tensor=2))
    assert on_ranks(4, tmp_path, config, partial(destinations, make_batch(0, REWARDS))) == [1, 2]  # not 3: 2 sends it


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(RollartError, match=r"rank 1 of 2 did not join at 127\.0\.0\.1:\d+ within 0\.2 s"):
        Ranks.join(RankAddress(0, 2, free_address()), patience=1.0, deadline=0.2)


def test_a_rank_0_that_is_not_there_is_named() -> None:
    with pytest.raises(RollartError, match=r"rank 1 of 2 found no rank 0 at 127\.0\.0\.1:\d+ within 0\.2 s"):
        Ranks.join(RankAddress(1, 2, free_address()), patience=1.0, deadline=0.2)


def test_one_rank_needs_no_group() -> None:
    ranks = Ranks.join(RankAddress(0, 1, "nowhere:0"), patience=1.0)
    assert ranks.context is None and ranks.tensor is None
    assert not torch.distributed.is_initialized()
