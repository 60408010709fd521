"""Batches that grow while the trainer waits for them: the sizes by themselves, and in whole simulated runs."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollart.config.rollout import RolloutConfig
from rollart.core.event_log import read_events
from rollart.core.events import BatchTaken
from rollart.core.schedule import preset
from rollart.rollout.elastic import TOLERATED, BatchSizer
from rollart.rollout.mixture import Mixture
from rollart.simulator.scenario import load
from rollart.simulator.simulation import simulate


@given(
    st.integers(1, 500),
    st.floats(1.0, 8.0),
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), max_size=30),
)
def test_a_batch_keeps_between_its_own_size_and_the_largest(
    groups: int, factor: float, alpha: int, steps: list[tuple[float, float]]
) -> None:
    sizer, now = BatchSizer(groups, factor, alpha), 0.0
    for busy, waited in steps:
        now += busy + waited
        sizer.taken(sizer.size, now, waited)
        assert groups <= sizer.size <= groups * factor
        if factor == 1.0:
            assert sizer.size == groups


@given(st.integers(20, 500), st.integers(1, 4), st.floats(1.0, 6.0), st.floats(0.1, 10.0))
def test_sizes_grow_just_until_training_takes_as_long_as_making_a_batch(
    groups: int, alpha: int, needed: float, per_group: float
) -> None:
    """Making a batch takes `latency`, whatever its size; a batch that is resized is taken `alpha + 1` batches later."""
    latency = alpha * groups * needed * per_group
    sizer, now, sizes = BatchSizer(groups, 8.0, alpha), 0.0, [groups] * (alpha + 1)
    served = [0.0] * (alpha + 1)  # when the batches to come may begin to be made
    waits = []
    for _ in range(40):
        waited = max(0.0, served.pop(0) + latency - now) if len(waits) > alpha else 0.0
        now += waited
        size = sizes.pop(0)
        sizer.taken(size, now, waited)
        now += size * per_group
        waits.append(waited / (size * per_group))
        sizes.append(sizer.size)
        served.append(now)
    assert max(waits[-6:]) <= 3 * TOLERATED + 1.0 / groups * (alpha + 1)
    assert max(sizes) <= groups * needed * 2 + 2


def test_a_wait_that_is_over_is_forgotten() -> None:
    sizer = BatchSizer(10, 4.0, 1)
    for number in range(3):
        sizer.taken(10, 100.0 * number, 50.0)
    assert sizer.size == 30  # each of the steps was 100 s too short
    for number in range(60):
        sizer.taken(10, 300.0 + 100.0 * number, 0.0)
    assert sizer.size == 10


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
    st.integers(1, 3),
)
def test_the_mixture_is_exact_whatever_the_sizes(weights: list[float], sizes: list[int], ahead: int) -> None:
    tasks = {f"t{n}": weight for n, weight in enumerate(weights)}
    mixture, counts = Mixture(tasks, sizes[0]), Counter[str]()
    for batch, size in enumerate(sizes):
        mixture.resize(size, batch)
        mixture.quota(batch + ahead)  # looked ahead, as admission does
        quota = mixture.quota(batch)
        assert sum(quota.values()) == size
        counts.update(quota)
        for task, weight in tasks.items():
            assert abs(counts[task] - weight / sum(weights) * sum(sizes[: batch + 1])) <= 1.0 + 1e-6


def test_batches_that_are_being_made_keep_their_size_when_a_task_leaves() -> None:
    mixture = Mixture({"a": 1, "b": 1}, 4)
    mixture.resize(8, 3)
    mixture.only(["a"], 2)
    assert [mixture.quota(batch) for batch in range(1, 5)] == [
        {"a": 2, "b": 2},
        {"a": 4, "b": 0},
        {"a": 8, "b": 0},
        {"a": 8, "b": 0},
    ]


SLOW_WEIGHTS = """
name: waiting
model: {name: qwen3-8b}
tasks:
  - {name: chat, weight: 3, max_turns: 20, max_context: 16384, sampling: {max_tokens: 1024}}
  - {name: sum, weight: 2, max_turns: 1, max_context: 8192, sampling: {max_tokens: 4096}}
rollout: {trajectory_deadline: 3000}
pools:
  trainer: {role: train, device: H800, count: 4}
  fast: {role: generate, device: H800, count: 4}
environments: {processes: 1000, reset_deadline: 60, hedges: 0}
training: {steps: 24, batch_groups: 10, group_size: 4}
simulate:
  warmup: 10
  links: {slow: 12}
  train: {fixed: 2, token: 0.001}
  weights: {push: slow, pull: infiniband}
  workloads:
    chat: {turns: {lognormal: {mean: 6, sigma: 0.6}, max: 20}, observation: 300, response: 100, reset: 5, step: 2}
    sum: {response: {lognormal: {mean: 700, sigma: 0.6}, max: 4000}, reward: 1}
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_trainer_waits_for_a_twentieth_of_the_time_at_most(tmp_path: Path, seed: int) -> None:
    (tmp_path / "waiting.yaml").write_text(SLOW_WEIGHTS)
    fixed = simulate(load(tmp_path / "waiting.yaml"), seed=seed)
    grown = simulate(load(tmp_path / "waiting.yaml", ["rollout.elastic=8"]), seed=seed, folder=tmp_path)
    assert fixed.trainer_use < 0.8
    assert grown.trainer_use >= 0.95
    assert grown.tokens_per_s > 1.2 * fixed.tokens_per_s
    taken = [event for event in read_events(tmp_path / "events") if isinstance(event, BatchTaken)]
    assert len(taken) == 24
    counts = Counter[str]()
    for event in taken:
        assert set(event.staleness) <= {0, 1}
        counts.update(event.groups)
        assert abs(counts["chat"] - 0.6 * counts.total()) <= 1.0 + 1e-6
    assert not grown.drops


def test_without_staleness_a_batch_cannot_grow() -> None:
    with pytest.raises(ValidationError, match="with alpha 0 the trainer waits for every batch"):
        RolloutConfig(alpha=0, elastic=2.0)
    with pytest.raises(ValueError, match="with alpha 0 the trainer waits for every batch"):
        preset("rollart", 0, 2.0, 0, 0, elastic=2.0)
