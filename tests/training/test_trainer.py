import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import make_batch, make_sample, save_tiny

from rollart.config import AlgorithmConfig, TrainingConfig
from rollart.core.column import Column
from rollart.core.errors import RollartError
from rollart.core.types import Batch, SampleGroup
from rollart.training.packing import pack
from rollart.training.trainer import Trainer

SPREAD = [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def trainer(folder: Path, **options: object) -> Trainer:
    algorithm = AlgorithmConfig(**options.pop("algorithm", {}))  # type: ignore[arg-type]
    return Trainer(folder, TrainingConfig(algorithm=algorithm, **options))  # type: ignore[arg-type]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer.snapshot()[1]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def with_true_logprobs(trainer: Trainer, batch: Batch) -> Batch:
    """The batch as an engine with the trainer's own weights would have made it."""
    groups = []
    for group in batch.groups:
        samples = []
        for sample in group.samples:
            with torch.no_grad():
                values, _ = trainer.learner.policy.logprobs(pack([sample.tokens.array], [sample.mask]))
            samples.append(replace(sample, logprobs=Column.floats(values.numpy())))
        groups.append(replace(group, samples=tuple(samples)))
    return replace(batch, groups=tuple(groups))


def test_a_step_makes_good_tokens_likelier_and_bad_ones_less_likely(folder: Path) -> None:
    subject = trainer(folder, lr=1e-3, lr_warmup=0)
    batch = make_batch(0, [[1.0, 0.0]])
    good, bad = batch.groups[0].samples

    def likelihood() -> list[float]:
        with torch.no_grad():
            return [
                subject.learner.policy.logprobs(pack([s.tokens.array], [s.mask]))[0].mean().item() for s in (good, bad)
            ]

    before = likelihood()
    subject.step(batch)
    after = likelihood()
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_the_same_batches_give_the_same_weights(folder: Path) -> None:
    runs = []
    for _ in range(2):
        subject = trainer(folder, epochs=2)
        for step in range(3):
            subject.step(make_batch(step, SPREAD, seed=step))
        runs.append(weights(subject))
    assert same(*runs)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("aggregate", ["token", "sequence", "group"])
def test_micro_batches_do_not_change_the_step(folder: Path, loss: str, aggregate: str) -> None:
    norms = []
    for pack_tokens in (1, 64, 8192):
        algorithm = {"loss": loss, "aggregate": aggregate, "kl": 0.1, "entropy": 0.01}
        subject = trainer(folder, pack_tokens=pack_tokens, epochs=2, algorithm=algorithm)
        values = subject.step(make_batch(0, SPREAD)).values
        norms.append((values["grad_norm"], values["loss"]))
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert norms[2] == pytest.approx(norms[0], rel=1e-3)


def test_the_gap_is_zero_when_the_engine_has_the_same_weights(folder: Path) -> None:
    subject = trainer(folder)
    values = subject.step(with_true_logprobs(subject, make_batch(0, SPREAD))).values
    assert values["logprob_gap"] < 1e-5
    assert values["importance"] == pytest.approx(1.0, abs=1e-5)


def test_metrics_by_hand(folder: Path) -> None:
    draw = random.Random(0)
    batch = Batch(
        4,
        (
            SampleGroup(
                "0", "a", (make_sample(1.0, draw, task="a", version=4), make_sample(0.0, draw, task="a", version=2))
            ),
            SampleGroup(
                "1", "a", (make_sample(1.0, draw, task="a", version=3), make_sample(1.0, draw, task="a", version=4))
            ),
            SampleGroup("2", "b", (make_sample(0.5, draw, task="b", version=4),)),
        ),
    )
    metrics = Trainer(folder, TrainingConfig(), version=4).step(batch)
    assert metrics.version == 5
    assert metrics.tokens == 60
    assert (
        metrics.tasks["a"].items()
        >= {
            "reward": 0.75,
            "spread": 0.5,
            "solved": 0.5,
            "staleness": 0.75,
            "truncated": 0.0,
            "samples": 4.0,
            "action_tokens": 28.0,
        }.items()
    )
    assert metrics.tasks["b"]["spread"] == 0.0
    assert "entropy" not in metrics.tasks["b"]  # no token of it was trained
    assert metrics.values["action_tokens"] == 28.0
    assert metrics.values["updates"] == 1.0


def two_tasks() -> Batch:
    draw = random.Random(0)
    groups = [
        SampleGroup(str(number), task, tuple(make_sample(reward, draw, task=task) for reward in (1.0, 0.0)))
        for number, task in enumerate(("a", "b", "b"))
    ]
    return Batch(0, tuple(groups))


@pytest.mark.parametrize("options", [{}, {"epochs": 2, "pack_tokens": 16}, {"updates": 2}])
def test_the_losses_and_gradients_of_tasks_add_up_to_those_of_the_batch(
    folder: Path, options: dict[str, object]
) -> None:
    algorithm = {"kl": 0.1, "entropy": 0.01}
    metrics = trainer(folder, algorithm=algorithm, **options).step(two_tasks())
    values, rows = metrics.values, metrics.tasks
    assert sum(row["loss"] for row in rows.values()) == pytest.approx(values["loss"], abs=1e-6)
    squares = sum(row["logprob_grad"] ** 2 for row in rows.values())
    assert math.sqrt(squares) == pytest.approx(values["logprob_grad"])
    assert values["logprob_grad"] > 0
    for name in ("entropy", "kl", "clip_fraction"):
        whole = sum(rows[task][name] * rows[task]["action_tokens"] for task in rows) / values["action_tokens"]
        assert whole == pytest.approx(values[name], abs=1e-6), name


def test_the_gradient_at_the_logprobs_of_a_task_by_hand(folder: Path) -> None:
    """Reinforce: the loss is -weight x advantage x logprob, and every token has weight 1 / tokens."""
    algorithm = {"loss": "reinforce", "correction": {"use": []}, "advantage": "rloo"}
    rows = trainer(folder, algorithm=algorithm).step(two_tasks()).tasks
    tokens = {task: row["action_tokens"] for task, row in rows.items()}
    for task, row in rows.items():  # rloo of rewards 1 and 0: advantages of 1 and -1
        assert row["logprob_grad"] == pytest.approx(math.sqrt(tokens[task]) / sum(tokens.values()), rel=1e-4)


def test_a_batch_with_nothing_to_learn_leaves_the_weights_alone(folder: Path) -> None:
    subject = trainer(folder)
    subject.step(make_batch(0, SPREAD))
    before = weights(subject)
    metrics = subject.step(make_batch(1, [[0.0, 0.0], [0.3]]))
    assert same(before, weights(subject))
    assert metrics.version == 2
    assert metrics.values["updates"] == 0.0


def test_rewards_that_never_differ_are_reported(folder: Path) -> None:
    subject = trainer(folder, lr=1e-3)
    said = [subject.step(make_batch(step, [[0.5, 0.5], [0.5, 0.5]])).warnings for step in range(4)]
    about = [[sentence for sentence in sentences if "the same reward" in sentence] for sentences in said]
    assert [len(sentences) for sentences in about] == [0, 0, 1, 0]
    assert "trajectories of task t got the same reward so far, 0.5" in about[2][0]


def test_rewards_that_differed_once_are_not_reported(folder: Path) -> None:
    subject = trainer(folder, lr=1e-3)
    rewards = [[0.5, 0.0]], [[0.5, 0.5]], [[0.5, 0.5]]
    said = [subject.step(make_batch(step, each)).warnings for step, each in enumerate(rewards)]
    assert not any("same reward" in sentence for sentences in said for sentence in sentences)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_skipped_and_says_so(folder: Path, poison: float) -> None:
    subject = trainer(folder)
    before = weights(subject)
    metrics = subject.step(make_batch(0, [[poison, 0.0], [1.0, 0.0]]))
    assert metrics.values["skipped"] == 1.0
    assert any("left the weights alone" in warning for warning in metrics.warnings)
    assert metrics.version == subject.version == 1
    assert same(before, weights(subject))
    assert subject.step(make_batch(1, SPREAD)).values["skipped"] == 0.0
    assert not same(before, weights(subject))


def test_the_learning_rate_warms_up(folder: Path) -> None:
    subject = trainer(folder, lr=1e-3, lr_warmup=4)
    rates = [subject.step(make_batch(step, SPREAD)).values["lr"] for step in range(5)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


def test_the_learning_rate_is_scaled_by_the_share_of_groups_with_spread(folder: Path) -> None:
    rewards = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
    for power, share in ((1.0, 0.5), (0.5, 0.5**0.5), (0.0, 1.0)):
        subject = trainer(folder, lr=1e-3, lr_warmup=0, algorithm={"evidence_power": power})
        assert subject.step(make_batch(0, rewards)).values["lr"] == pytest.approx(share * 1e-3)


def test_the_first_of_several_updates_is_never_clipped_and_later_ones_are(folder: Path) -> None:
    values = trainer(folder, lr=0.05, lr_warmup=0).step(make_batch(0, SPREAD)).values
    assert values["clip_fraction"] == 0.0
    values = trainer(folder, lr=0.05, lr_warmup=0, epochs=3).step(make_batch(0, SPREAD)).values
    assert values["clip_fraction"] > 0.0
    assert values["updates"] == 3.0


def test_the_kl_is_zero_at_the_start_and_grows(folder: Path) -> None:
    subject = trainer(folder, lr=1e-2, algorithm={"kl": 0.1})
    assert subject.step(make_batch(0, SPREAD)).values["kl"] == pytest.approx(0.0, abs=1e-6)
    assert subject.step(make_batch(1, SPREAD)).values["kl"] > 1e-4


def test_an_entropy_bonus_makes_the_policy_less_sure(folder: Path) -> None:
    draw = random.Random(0)
    batch = Batch(0, (SampleGroup("0", "t", tuple(make_sample(1.0, draw) for _ in range(4))),))
    subject = trainer(folder, lr=1e-2, lr_warmup=0, algorithm={"entropy": 1.0, "evidence_power": 0.0})
    first = subject.step(batch).values["entropy"]
    assert subject.step(replace(batch, step=1)).values["entropy"] > first


def test_a_batch_for_another_version_is_refused(folder: Path) -> None:
    with pytest.raises(RollartError, match="for version 3, but the trainer is at version 0"):
        trainer(folder).step(make_batch(3, SPREAD))


def test_a_sample_whose_lists_disagree_is_refused(folder: Path) -> None:
    batch = make_batch(0, [[1.0, 0.0]])
    broken = replace(batch.groups[0].samples[0], logprobs=[0.0])
    group = replace(batch.groups[0], samples=(broken,))
    with pytest.raises(ValueError, match="1 logprobs"):
        trainer(folder).step(Batch(0, (group,)))


def test_a_snapshot_is_not_changed_by_later_steps_and_keeps_ties(folder: Path) -> None:
    subject = trainer(folder)
    version, tensors = subject.snapshot()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    subject.step(make_batch(0, SPREAD))
    assert version == 0
    assert same(tensors, before)
    assert tensors["lm_head.weight"].data_ptr() == tensors["model.embed_tokens.weight"].data_ptr()
