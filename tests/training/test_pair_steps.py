"""Pairs on the trainer: the chosen becomes likelier than the rejected, however they are packed."""

from dataclasses import replace
from pathlib import Path

import pytest
from forked_ranks import on_ranks
from tiny_models import VOCABULARY, save_tiny

from rollart.config import AlgorithmConfig, TrainingConfig
from rollart.core.column import Column
from rollart.core.types import Batch, Sample, SampleGroup, TokenRole
from rollart.training.trainer import Trainer

DPO = AlgorithmConfig(loss="dpo", beta=0.5, aggregate="sequence", evidence_power=0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def sequence(number: int, last: int, reward: float, step: int) -> Sample:
    """`number` decides length and prompt, so that pairs are of different sizes."""
    prompt = [(number * 7 + at) % VOCABULARY for at in range(3 + 4 * number)]
    roles = [TokenRole.PROMPT] * len(prompt) + [TokenRole.ACTION] * 2
    return Sample(
        id=f"{number}.{reward:g}",
        task="pairs",
        tokens=Column.ints([*prompt, last, 1]),
        roles=Column.flags(roles),
        logprobs=Column.floats([0.0, 0.0]),
        versions=Column.ints([step, step]),
        reward=reward,
    )


def pairs(step: int) -> Batch:
    groups = [
        SampleGroup(str(number), "pairs", (sequence(number, 5, 1.0, step), sequence(number, 9, 0.0, step)))
        for number in range(6)
    ]
    return Batch(step, tuple(groups))


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_what_was_chosen_becomes_likelier_than_what_was_rejected(folder: Path, loss: str) -> None:
    algorithm = DPO.model_copy(update={"loss": loss})
    trainer = Trainer(folder, TrainingConfig(lr=1e-2, lr_warmup=0, algorithm=algorithm))
    steps = [trainer.step(pairs(step)) for step in range(12)]
    first, last = steps[0], steps[-1]
    assert first.values["pair_margin"] == pytest.approx(0.0, abs=1e-6), "at the start the policy is its reference"
    assert last.values["pair_accuracy"] == 1.0 and last.values["loss"] < first.values["loss"]
    assert not any(step.warnings or step.tasks or step.gaps for step in steps), "nothing was sampled by an engine"


def test_pairs_stay_together_in_a_pass(folder: Path) -> None:
    """One pair in each pass gives the update of all in one; a pair that was torn apart would be an error."""
    losses = []
    for tokens in (8, 100_000):
        trainer = Trainer(folder, TrainingConfig(lr=1e-2, lr_warmup=0, pack_tokens=tokens, algorithm=DPO))
        losses.append([trainer.step(pairs(step)).values["loss"] for step in range(3)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_several_updates_of_a_batch_count_as_the_policys_own(folder: Path) -> None:
    trainer = Trainer(folder, TrainingConfig(lr=1e-3, updates=3, algorithm=DPO))
    values = trainer.step(pairs(0)).values
    assert values["updates"] == 3 and values["logprob_gap"] == 0.0 and values["importance"] == pytest.approx(1.0)


def scored(step: int) -> Batch:
    """As a reward model gets them: one trained token, after the last that is read."""
    groups = []
    for group in pairs(step).groups:
        cut = (
            replace(
                sample,
                roles=Column.flags([*sample.roles.array[:-2], 0, 1]),
                logprobs=Column.floats([0.0]),
                versions=Column.ints([step]),
            )
            for sample in group.samples
        )
        groups.append(replace(group, samples=tuple(cut)))
    return Batch(step, tuple(groups))


def margins(trainer: Trainer) -> list[float]:
    return [trainer.step(scored(step)).values["pair_margin"] for step in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_train_the_adapters_and_the_head_of_a_reward_model_as_one_does(folder: Path, dtype: str) -> None:
    algorithm = AlgorithmConfig(loss="bradley_terry", aggregate="sequence", evidence_power=0.0)
    config = TrainingConfig(lr=1e-2, lr_warmup=0, dtype=dtype, lora={"rank": 3, "alpha": 5}, algorithm=algorithm)  # type: ignore[arg-type]
    alone = margins(Trainer(folder, config))
    assert alone[0] == 0.0 and alone[2] > alone[1] > 0
    assert on_ranks(2, folder, config, margins) == pytest.approx(alone, rel=1e-3 if dtype == "float32" else 0.1)
