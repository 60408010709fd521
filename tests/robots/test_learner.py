"""Imitation: stacks of policies, checkpoints, resume, and policies that act."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from rollart.config.robots import ControlConfig, ImitationConfig, MeanFlowConfig, NetworkConfig, RegressionConfig
from rollart.core.errors import RollartError
from rollart.robots.chunks import ImitationData
from rollart.robots.demonstrations import Demonstration
from rollart.robots.learner import DivergedError, ImitationLearner, LearnerConfig, TrainedPolicy

CONTROL = ControlConfig(history=2, chunk=4, execute=2)


def config(lr: float = 1e-2, steps: int = 200) -> LearnerConfig:
    training = ImitationConfig(steps=steps, batch=32, lr=lr, lr_warmup=10)
    return LearnerConfig(
        policy=MeanFlowConfig(), control=CONTROL, network=NetworkConfig(width=32, layers=2), training=training
    )


def data(seed: int = 0) -> ImitationData:
    """Actions that are a function of the position."""
    rng = np.random.default_rng(seed)
    episodes = []
    for _ in range(8):
        seen = np.cumsum(rng.normal(size=(30, 2)), 0).astype(np.float32)
        episodes.append(Demonstration(seen, np.tanh(seen[:, :1])))
    return ImitationData.of(episodes, CONTROL)


def weights(learner: ImitationLearner, member: int = 0) -> torch.Tensor:
    return torch.cat([value[member].flatten() for value in learner.averaged.values()])


def test_a_policy_learns_what_was_demonstrated(tmp_path: Path) -> None:
    learner, shown = ImitationLearner(config(), [data()], [0]), data()
    early, late = learner.train(20), learner.train(180)
    assert late[0] < early[0]
    learner.export([tmp_path / "policy"], ["toy:obstacle"])
    policy = TrainedPolicy(tmp_path / "policy")
    noise = torch.randn(len(shown.chunks), policy.noise_size)
    found = policy.policy.sample(policy.network, shown.conditions[None], noise[None])[0]
    assert (found[:, 0] - shown.chunks[:, 0]).abs().mean() < 0.15
    assert (policy.task, policy.step, policy.observations, policy.actions) == ("toy:obstacle", 200, 2, 1)


def test_a_member_of_a_stack_learns_what_it_would_alone() -> None:
    stack = ImitationLearner(config(), [data(0), data(1)], [3, 4])
    alone = ImitationLearner(config(), [data(1)], [4])
    stack.train(20)
    alone.train(20)
    assert torch.allclose(weights(stack, 1), weights(alone), atol=1e-4)
    assert not torch.allclose(weights(stack, 0), weights(stack, 1), atol=1e-2)


def test_a_resumed_learner_goes_on_exactly_where_it_was(tmp_path: Path) -> None:
    straight = ImitationLearner(config(), [data()], [0])
    straight.train(30)
    first = ImitationLearner(config(), [data()], [0])
    first.train(20)
    first.save(tmp_path / "000020")
    second = ImitationLearner(config(), [data()], [9])
    second.load(tmp_path / "000020")
    second.train(10)
    assert second.step == 30
    assert torch.equal(weights(second), weights(straight))


def test_a_checkpoint_of_another_policy_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    learner = ImitationLearner(config(), [data()], [0])
    learner.train(1)
    learner.save(tmp_path / "000001")
    other = ImitationLearner(config().model_copy(update={"policy": RegressionConfig()}), [data()], [0])
    with pytest.raises(RollartError, match="was made with another `policy`; start a new run"):
        other.load(tmp_path / "000001")
    (tmp_path / "000001" / "state.safetensors").write_bytes(b"short")
    with pytest.raises(RollartError, match="cannot be read"):
        learner.load(tmp_path / "000001")
    with pytest.raises(RollartError, match="holds no policy"):
        TrainedPolicy(tmp_path)


def test_a_loss_that_is_not_finite_stops_the_training() -> None:
    bad = data()
    learner = ImitationLearner(config(), [ImitationData(bad.conditions, bad.chunks * math.inf, bad.scaling)], [0])
    with pytest.raises(DivergedError, match=r"not finite before step 3; lower training\.lr"):
        learner.train(3)
