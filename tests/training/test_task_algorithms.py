"""Tasks with algorithms of their own: in one batch each is trained as it would be alone."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_batch, make_sample, save_tiny
from torch import Tensor

from rollart.config import AlgorithmConfig, TrainingConfig
from rollart.config.algorithm import CRITIC_ADVANTAGES
from rollart.core.types import Batch, SampleGroup
from rollart.training.advantages import ADVANTAGES
from rollart.training.advantages.base import critic_estimators
from rollart.training.algorithms import Algorithms
from rollart.training.matrix_optimizers import read_state
from rollart.training.trainer import Trainer

GROUP = {"aggregate": "group", "correction": [], "solved_advantage": 0.0}
OWN: dict[str, dict[str, Any]] = {
    "a": {"advantage": "grpo", "loss": "ppo", "entropy": 0.01},
    "b": {"advantage": "dr_grpo", "loss": "gspo", "correction": ["sequence"]},
    "c": {"advantage": "gae", "loss": "reinforce", "gae_level": "turn"},
}


def algorithm(**keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(GROUP | keys)


def group(task: str, seed: int) -> SampleGroup:
    draw = random.Random(seed)
    made = [make_sample(reward, draw, task=task, length=draw.randint(9, 16)) for reward in (1.0, 0.0, 0.5)]
    return SampleGroup(f"{task}{seed}", task, tuple(replace(each, id=f"{task}{n}") for n, each in enumerate(made)))


def gradient(folder: Path, batch: Batch, run: AlgorithmConfig, tasks: dict[str, AlgorithmConfig]) -> dict[str, Tensor]:
    """After one update the first moment is a tenth of it."""
    config = TrainingConfig(grad_clip=1e9, algorithm=run, pack_tokens=10**6)
    trainer = Trainer(folder, config, tasks=tasks)
    trainer.step(batch)
    optimizer, named = trainer.learner.state.optimizer, trainer.learner.policy.parameters().items()
    return {name: 10 * read_state(optimizer, parameter)["exp_avg"] for name, parameter in named}


def test_each_task_of_a_batch_is_trained_by_its_own_algorithm(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    groups = {task: group(task, number) for number, task in enumerate(OWN)}
    own = {task: algorithm(**keys) for task, keys in OWN.items()}
    together = gradient(folder, Batch(0, tuple(groups.values())), algorithm(), own)
    alone = [gradient(folder, Batch(0, (groups[task],)), own[task], {}) for task in OWN]
    for name, value in together.items():
        expected = sum(each[name] for each in alone) / len(alone)
        assert torch.allclose(value, expected, rtol=0, atol=1e-6 * max(1.0, float(expected.abs().max())))  # type: ignore[union-attr]
        assert not torch.allclose(alone[0][name], alone[1][name], rtol=0, atol=1e-6)


def test_ways_to_aggregate_have_the_share_of_their_groups(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    one, two = group("a", 0), group("b", 1)
    own = {"a": algorithm(aggregate="token"), "b": algorithm(aggregate="sequence")}
    together = gradient(folder, Batch(0, (one, two)), algorithm(), own)
    alone = [gradient(folder, Batch(0, (each,)), own[each.task], {}) for each in (one, two)]
    for name, value in together.items():
        assert torch.allclose(value, (alone[0][name] + alone[1][name]) / 2, rtol=0, atol=1e-6)


def test_a_task_whose_algorithm_is_the_run_s_changes_nothing(tmp_path: Path) -> None:
    folder, batch = save_tiny(tmp_path / "model"), make_batch(0, [[1.0, 0.0], [0.5, 0.0]])
    plain = gradient(folder, batch, algorithm(), {})
    same = gradient(folder, batch, algorithm(), {"t": algorithm()})
    assert all(torch.equal(plain[name], same[name]) for name in plain)
    other = algorithm(loss="gspo")
    assert len(Algorithms(algorithm(), {"t": algorithm(), "u": other, "v": other}).all) == 2


def test_the_advantages_that_need_a_critic_are_known_without_importing_them() -> None:
    assert {name for name in ADVANTAGES.names() if ADVANTAGES.find(name) in critic_estimators} == set(CRITIC_ADVANTAGES)


def test_a_critic_is_asked_only_about_tasks_that_need_it(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    trainer = Trainer(folder, TrainingConfig(), tasks={"c": algorithm(**OWN["c"])})
    both = trainer.step(Batch(0, (group("a", 0), group("c", 1)))).values
    single = Trainer(folder, TrainingConfig(algorithm=algorithm(**OWN["c"])))
    only = single.step(Batch(0, (group("c", 1),))).values
    assert both["value_loss"] == pytest.approx(only["value_loss"], rel=1e-5)
    assert both["explained_variance"] == pytest.approx(only["explained_variance"], abs=1e-6)
