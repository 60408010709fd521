"""GAE and its critic: values against plain references, and a value model that learns, is resumed and is divided."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_models import make_batch, make_sample, save_tiny

from rollart.config import AlgorithmConfig, TrainingConfig
from rollart.core.column import Column
from rollart.core.errors import RollartError
from rollart.core.teaching import Teaching
from rollart.core.types import Batch, SampleGroup, TurnSpan
from rollart.training.advantages import ADVANTAGES, PlayedTokens, RewardRange, token_advantages
from rollart.training.advantages.tokens import generalised_advantages, value_targets
from rollart.training.block_files import BlockReader
from rollart.training.checkpoint import load_checkpoint, save_checkpoint
from rollart.training.critic import explained_variance, value_loss
from rollart.training.export import export_model
from rollart.training.trainer import Trainer

NUMBERS = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=12)
UNIT = st.floats(0.0, 1.0)


def plain_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The sum of its definition."""
    deltas = [r + gamma * v1 - v for r, v, v1 in zip(rewards, values, [*values[1:], 0.0], strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@given(NUMBERS, UNIT, UNIT)
def test_gae_is_the_sum_of_its_definition(steps: list[tuple[float, float]], gamma: float, lam: float) -> None:
    rewards, values = [r for r, _ in steps], [v for _, v in steps]
    got = generalised_advantages(np.array(rewards), np.array(values), gamma, lam)
    assert got.tolist() == pytest.approx(plain_gae(rewards, values, gamma, lam), abs=1e-6)


TURNS = st.lists(st.tuples(st.integers(0, 4), st.floats(-3, 3)), min_size=1, max_size=5)


def token_episode(turns: list[tuple[int, float]], seed: int = 0) -> PlayedTokens:
    lengths, rewards = zip(*turns, strict=True)
    values = np.random.default_rng(seed).normal(size=sum(lengths))
    return PlayedTokens(lengths, rewards, np.zeros(sum(lengths)), values)


def estimate(member: PlayedTokens, **keys: object) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    config = AlgorithmConfig.model_validate({"advantage": "gae", **keys})
    ((advantage,),) = ADVANTAGES.find("gae")([[member]], config)
    return advantage, value_targets(member, config)


@given(TURNS.filter(lambda turns: turns[0][0] > 0), UNIT.filter(lambda x: x > 0), UNIT)
def test_the_reward_of_a_turn_comes_with_its_last_token(
    turns: list[tuple[int, float]], gamma: float, lam: float
) -> None:
    member = token_episode(turns)
    assert member.values is not None
    rewards, last = [0.0] * len(member.values), -1
    for length, reward in turns:  # one without tokens belongs to the token before
        last += length
        rewards[last] += reward
    advantage, targets = estimate(member, discount=gamma, gae_lambda=lam)
    assert advantage.tolist() == pytest.approx(plain_gae(rewards, member.values.tolist(), gamma, lam), abs=1e-6)
    assert targets.tolist() == pytest.approx((advantage + member.values).tolist(), abs=1e-6)


def test_turns_are_steps_with_the_value_of_their_first_token() -> None:
    member = token_episode([(3, 0.5), (0, 0.25), (2, 1.0)])
    assert member.values is not None
    first, second = member.values[0], member.values[3]
    expected = plain_gae([0.75, 1.0], [first, second], 0.9, 0.8)
    advantage, targets = estimate(member, discount=0.9, gae_lambda=0.8, gae_level="turn")
    assert advantage.tolist() == pytest.approx([expected[0]] * 3 + [expected[1]] * 2, abs=1e-6)
    assert targets[[0, 3]].tolist() == pytest.approx([expected[0] + first, expected[1] + second], abs=1e-6)
    assert np.isnan(targets[[1, 2, 4]]).all()


def test_values_of_segments_are_read_and_written_in_the_order_of_turns() -> None:
    draw = random.Random(0)
    first = replace(make_sample(1.0, draw), id="a", turns=(TurnSpan(0, 3, 5), TurnSpan(2, 7, 12)))
    second = replace(make_sample(1.0, draw), id="a/1", trajectory="a", turns=(TurnSpan(1, 3, 5), TurnSpan(3, 7, 12)))
    batch = Batch(0, (SampleGroup("g", "t", (first, second)),))
    values = [[np.arange(7, dtype=np.float32), 10 + np.arange(7, dtype=np.float32)]]
    config = AlgorithmConfig(advantage="gae", gae_lambda=0.0, solved_advantage=0.0)
    ((one, two),), _ = token_advantages(ADVANTAGES.find("gae"), batch, [RewardRange(0.0, 2.0)], config, values)
    # lambda 0: the difference to the next value; turns 0 and 2 are in the first sample, 1 and 3 in the second
    assert one.tolist() == [1.0, 9.0, 1.0, 1.0, 1.0, 1.0, 6.0]
    assert two.tolist() == [1.0, -9.0, 1.0, 1.0, 1.0, 1.0, 1.0 - 16.0]


def test_gae_without_a_critic_and_opd_without_a_teacher_are_refused() -> None:
    batch = make_batch(0, [[1.0, 0.0]])
    for name, message in (("gae", "needs the values of a critic"), ("opd", "needs the logprobs of a teacher")):
        with pytest.raises(RollartError, match=message):
            token_advantages(ADVANTAGES.find(name), batch, [RewardRange(0.0, 1.0)], AlgorithmConfig(advantage=name))


def test_opd_is_how_much_likelier_the_teacher_finds_a_token_whatever_the_reward() -> None:
    made = make_sample(1.0, random.Random(0))
    teacher = np.linspace(-4, -1, made.actions, dtype=np.float32)
    sample = replace(made, teacher=Teaching(Column.floats(teacher)))
    batch = Batch(0, (SampleGroup("g", "t", (sample,)),))
    config = AlgorithmConfig(advantage="opd")
    ((row,),), solved = token_advantages(ADVANTAGES.find("opd"), batch, [RewardRange(0.0, 1.0)], config)
    assert row.tolist() == pytest.approx((teacher + 3.0).tolist(), abs=1e-6)
    assert solved == [False]


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=8))
def test_the_clipped_value_loss_is_its_plain_formula(rows: list[tuple[float, float, float]]) -> None:
    values, before, targets = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    expected = [max((v - r) ** 2, (min(max(v, old - 0.2), old + 0.2) - r) ** 2) / 2 for v, old, r in rows]
    assert value_loss(values, before, targets, 0.2).tolist() == pytest.approx(expected, abs=1e-6)
    assert value_loss(values, before, targets, None).tolist() == pytest.approx(
        [(v - r) ** 2 / 2 for v, _, r in rows], abs=1e-6
    )


def test_explained_variance_by_hand() -> None:
    targets = np.array([0.0, 1.0, np.nan, 2.0, 3.0], np.float32)
    assert explained_variance(targets, targets) == pytest.approx(1.0)
    assert explained_variance(np.full(5, 7.0, np.float32), targets) == pytest.approx(0.0)
    assert explained_variance(-targets, targets) == pytest.approx(-3.0)
    assert explained_variance(targets, np.ones(5, np.float32)) == 0.0


GAE = {"advantage": "gae", "normalise": "batch"}


def config_of(**keys: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"lr": 3e-3, "lr_warmup": 1, "algorithm": GAE, **keys})


REWARDS = [[1.0, 0.0, 0.5], [0.0, 0.0, 1.0]]


def test_a_critic_learns_what_a_batch_is_worth(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    config = config_of(critic={"warmup": 12, "epochs": 4, "clip": None})
    trainer = Trainer(folder, config)
    weights = {name: tensor.clone() for name, tensor in trainer.gather().items()}
    steps = [trainer.step(make_batch(step, REWARDS)) for step in range(12)]
    assert steps[0].values["explained_variance"] == pytest.approx(0.0, abs=0.6)  # values are 0 at first
    assert steps[-1].values["explained_variance"] > 0.9
    assert steps[-1].values["value_loss"] < steps[0].values["value_loss"] / 4
    assert all(torch.equal(tensor, weights[name]) for name, tensor in trainer.gather().items())
    assert steps[0].values["updates"] == 0 and steps[0].gaps
    after = trainer.step(make_batch(12, REWARDS))
    assert after.values["updates"] == 1
    assert not all(torch.equal(tensor, weights[name]) for name, tensor in trainer.gather().items())


def test_a_resumed_critic_goes_on_where_it_was(tmp_path: Path) -> None:
    folder, config = save_tiny(tmp_path / "model"), config_of()
    trainer = Trainer(folder, config)
    trainer.step(make_batch(0, REWARDS))
    save_checkpoint(trainer, tmp_path / "checkpoint").result()
    resumed = Trainer(folder, config)
    load_checkpoint(resumed, tmp_path / "checkpoint")
    expected, got = (one.step(make_batch(1, REWARDS, seed=1)).values for one in (trainer, resumed))
    assert got == expected
    export_model(tmp_path / "checkpoint", tmp_path / "export")
    assert Trainer(tmp_path / "export", TrainingConfig()).snapshot()[1].keys() == trainer.snapshot()[1].keys()
    plain = Trainer(folder, config_of(algorithm={}))
    load_checkpoint(plain, tmp_path / "checkpoint")
    save_checkpoint(plain, tmp_path / "without").result()
    with pytest.raises(RollartError, match="has no critic"):
        load_checkpoint(resumed, tmp_path / "without")


def step_and_save(path: Path, trainer: Trainer) -> dict[str, float]:
    values = trainer.step(make_batch(0, REWARDS)).values
    save_checkpoint(trainer, path).result()
    return values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "ranks", "parallel"),
    [
        ("qwen3", 2, {}),
        ("qwen3", 4, {"tensor": 2}),
        ("qwen3", 2, {"context": 2}),
        ("qwen3_moe", 2, {"expert": 2}),
    ],
)
def test_ranks_give_a_critic_the_gradients_of_one_process(
    tmp_path: Path, architecture: str, ranks: int, parallel: dict[str, int]
) -> None:
    """After one update the first moment is a tenth of the gradient."""
    folder = save_tiny(tmp_path / "model", architecture, tie_word_embeddings=False)
    config = config_of(grad_clip=1e9, parallel=parallel, pack_tokens=64)
    alone = step_and_save(tmp_path / "one", Trainer(folder, config_of(grad_clip=1e9)))
    shared = on_ranks(ranks, folder, config, partial(step_and_save, tmp_path / "ranks"))
    for name in ("value_loss", "explained_variance", "grad_norm"):
        assert shared[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6)
    with BlockReader(tmp_path / "one") as one, BlockReader(tmp_path / "ranks") as other:
        names = [name for name in one.shapes if name.startswith("critic_exp_avg/")]
        assert len(names) > 10
        for name in names:
            expected = one.whole(name)
            assert torch.allclose(other.whole(name), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
