"""Experts in training: replay, load, and the loss for an uneven one."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import EXPERTS, VOCABULARY, make_batch, save_tiny
from torch import Tensor

from rollart.config import AlgorithmConfig, TrainingConfig
from rollart.core.column import Column
from rollart.core.errors import RollartError
from rollart.core.expert_choice import ChoiceShape, ExpertChoices
from rollart.core.types import Batch, Sample
from rollart.training.microbatch import TrainSample, micro_batch
from rollart.training.packing import Packed
from rollart.training.policy import PolicyModel
from rollart.training.trainer import Trainer

LAYERS, CHOICES, COUNT = 2, EXPERTS["num_experts_per_tok"], EXPERTS["num_experts"]
SHAPE = ChoiceShape.of(LAYERS, CHOICES, COUNT)
REPLAY = TrainingConfig(replay_experts=True)


def choices(ids: Tensor) -> ExpertChoices:
    return ExpertChoices(0, SHAPE, bytes(ids.where(ids >= 0, 255).flatten().tolist()))


def packed(tokens: list[int], ids: Tensor | None = None) -> Packed:
    mask = [0] + [1] * (len(tokens) - 1)
    sample = TrainSample(
        tokens=Column.ints(tokens),
        mask=Column.flags(mask),
        behaviour=Column.floats([0.0] * sum(mask)),
        cells=Column.ints([0] * sum(mask)),
        advantage=Column.floats([1.0] * sum(mask)),
        weight=1.0,
        experts=None if ids is None else choices(ids),
    )
    return micro_batch([sample]).packed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path, "qwen3_moe", initializer_range=0.3)


def chosen_by(policy: PolicyModel, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """The experts that a policy uses by itself, and its logprobs."""
    seen: list[Tensor] = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
        for layer in policy.model.model.layers
    ]
    with torch.no_grad():
        logprobs, _ = policy.logprobs(packed(tokens))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1), logprobs


TOKENS = [random.Random(0).randrange(VOCABULARY) for _ in range(30)]


@torch.no_grad()
def test_the_trainer_uses_the_experts_of_the_engine_and_its_own_where_they_are_not_known(folder: Path) -> None:
    own, logprobs = chosen_by(PolicyModel(folder), TOKENS)
    policy = PolicyModel(folder, config=REPLAY)
    assert torch.allclose(policy.logprobs(packed(TOKENS, own.flip(-1)))[0], logprobs, atol=1e-6)  # in any order
    unknown = torch.full_like(own, -1)
    assert torch.equal(policy.logprobs(packed(TOKENS, unknown))[0], logprobs)
    other = own.clone()
    other[20] = (own[20] + 1) % COUNT
    changed = (policy.logprobs(packed(TOKENS, other))[0] - logprobs).abs()
    assert changed[:20].max() == 0 and changed[20] > 1e-3
    load = policy.expert_load()
    assert load is not None and (load.tokens, load.replayed) == (30, 30)
    assert torch.equal(PolicyModel(folder).logprobs(packed(TOKENS, other))[0], logprobs)  # without the key


def test_gates_have_gradients_when_experts_are_replayed(folder: Path) -> None:
    policy = PolicyModel(folder, config=REPLAY)
    ids = torch.stack([torch.randperm(COUNT)[:CHOICES] for _ in range(30 * LAYERS)]).view(30, LAYERS, CHOICES)
    policy.logprobs(packed(TOKENS, ids))[0].sum().backward()  # type: ignore[no-untyped-call]
    grad = policy.parameters()["model.layers.0.mlp.gate.weight"].grad
    assert grad is not None and grad.norm() > 1e-3


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_balance_loss_is_that_of_its_formula(folder: Path, recompute: Any) -> None:
    config = TrainingConfig(algorithm=AlgorithmConfig(expert_balance=1.0), recompute=recompute)
    policy, plain = PolicyModel(folder, config=config), PolicyModel(folder)
    logprobs, _ = policy.logprobs(packed(TOKENS))
    load = policy.expert_load()
    assert load is not None
    logits: list[Tensor] = []
    for layer in plain.model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, args, output: logits.append(output[0]))
    plain.logprobs(packed(TOKENS))
    expected = torch.zeros(())
    for layer in logits:
        share = torch.zeros(COUNT)
        for token in layer.topk(CHOICES).indices.tolist():
            for expert in token:
                share[expert] += 1 / (len(TOKENS) * CHOICES)
        expected = expected + COUNT * (share * layer.softmax(-1).mean(0)).sum() / LAYERS
    assert load.balance.item() == pytest.approx(expected.item(), rel=1e-6) and load.balance > 1
    expected.backward()  # type: ignore[no-untyped-call]
    (load.balance + 0 * logprobs.sum()).backward()
    name = "model.layers.1.mlp.gate.weight"
    got, wanted = (each.parameters()[name].grad for each in (policy, plain))
    assert got is not None and wanted is not None and torch.allclose(got, wanted, atol=1e-7)


def with_experts(batch: Batch, pick: Any) -> Batch:
    def sample(one: Sample) -> Sample:
        return replace(one, experts=pick(one))

    groups = (replace(group, samples=tuple(map(sample, group.samples))) for group in batch.groups)
    return replace(batch, groups=tuple(groups))


def test_a_step_reports_the_load_of_experts(folder: Path) -> None:
    batch = make_batch(0, [[1.0, 0.0, 0.5], [0.0, 1.0]])
    values = Trainer(folder, TrainingConfig()).step(batch).values
    assert 1 <= values["expert_load_max"] <= COUNT / CHOICES and 0 <= values["experts_unused"] < 1
    assert values["expert_balance"] > 0 and values["experts_replayed"] == 0
    ids = torch.tensor([[0, 1]] * LAYERS)
    narrow = with_experts(batch, lambda one: choices(ids.expand(len(one.tokens), LAYERS, CHOICES)))
    values = Trainer(folder, REPLAY).step(narrow).values
    assert (values["expert_load_max"], values["experts_unused"], values["experts_replayed"]) == (2.0, 0.5, 1.0)
    assert "expert_load_max" not in Trainer(save_tiny(folder / "dense"), TrainingConfig()).step(batch).values


def test_choices_of_another_model_are_refused(folder: Path) -> None:
    policy = PolicyModel(folder, config=REPLAY)
    with pytest.raises(RollartError, match="do not fit the trainer's model"):
        policy.logprobs(packed(TOKENS, torch.full((30, LAYERS, CHOICES), COUNT)))


@pytest.mark.parametrize(
    ("config", "key"),
    [(REPLAY, "training.replay_experts"), (TrainingConfig(algorithm=AlgorithmConfig(expert_balance=0.1)), "balance")],
)
def test_a_dense_model_cannot_replay_or_balance(tmp_path: Path, config: TrainingConfig, key: str) -> None:
    with pytest.raises(RollartError, match=rf"no mixture of experts.*leave out .*{key}"):
        PolicyModel(save_tiny(tmp_path), config=config)
