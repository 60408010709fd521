"""What a trajectory in several segments is to the trainer: one member of its group, with all its tokens."""

import random
from dataclasses import replace

import pytest
from tiny_models import make_sample

from rollart.config import AlgorithmConfig
from rollart.core.types import Batch, Sample, SampleGroup
from rollart.training.advantages import spread_over_tokens
from rollart.training.algorithms import Algorithms
from rollart.training.logprob_gap import Cells
from rollart.training.microbatch import plan_passes


def weight_of(items: list[list[list[object]]]) -> float:
    return sum(item.weight * item.actions for rank in items for part in rank for item in part)  # type: ignore[attr-defined]


def segments(count: int, reward: float, draw: random.Random, name: str) -> list[Sample]:
    made = [make_sample(reward, draw) for _ in range(count)]
    return [replace(sample, id=f"{name}/{number}", trajectory=name) for number, sample in enumerate(made)]


@pytest.mark.parametrize("aggregate", ["token", "sequence", "group"])
def test_segments_share_the_advantage_of_their_trajectory(aggregate: str) -> None:
    draw = random.Random(0)
    group = SampleGroup("g", "t", (*segments(3, 1.0, draw, "long"), *segments(1, 0.0, draw, "short")))
    batch = Batch(0, (group,))
    values = spread_over_tokens(batch, [[0.5, -0.5]])
    (passes,) = plan_passes(
        batch,
        values,
        Cells(0),
        algorithms=Algorithms(AlgorithmConfig.model_validate({"aggregate": aggregate})),
        pack_tokens=10**6,
    )
    items = [item for part in passes for item in part]
    assert sorted(float(item.advantage.array[-1]) for item in items) == [-0.5, 0.5, 0.5, 0.5]
    assert weight_of([[items]]) == pytest.approx(1.0)  # type: ignore[list-item]


def test_by_sequence_a_trajectory_weighs_the_same_in_any_number_of_segments() -> None:
    draw = random.Random(0)
    group = SampleGroup("g", "t", (*segments(3, 1.0, draw, "long"), *segments(1, 0.0, draw, "short")))
    batch = Batch(0, (group,))
    values = spread_over_tokens(batch, [[0.5, -0.5]])
    (passes,) = plan_passes(
        batch,
        values,
        Cells(0),
        algorithms=Algorithms(AlgorithmConfig(aggregate="sequence")),
        pack_tokens=10**6,
    )
    long = [item for part in passes for item in part if item.advantage.array[0] > 0]
    assert weight_of([[long]]) == pytest.approx(0.5)  # type: ignore[list-item]
