"""Supervised steps on the trainer: cross entropy of the trained tokens, on one rank or several."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import on_ranks
from tiny_models import VOCABULARY, save_tiny
from torch.nn import functional
from transformers import AutoModelForCausalLM

from rollart.config import TrainingConfig, WarmupConfig
from rollart.config.training import ParallelConfig
from rollart.core.errors import RollartError
from rollart.core.types import Example, ExampleBatch
from rollart.training.checkpoint import load_checkpoint, save_checkpoint
from rollart.training.export import export_model
from rollart.training.trainer import Trainer
from rollart.warmup.examples import batches

CONFIG = WarmupConfig(steps=80, batch=12, lr=2e-2)
EXAMPLES = [Example([1, start, (start * 5) % VOCABULARY], [0, 0, 1]) for start in range(VOCABULARY)]
UNEVEN = [Example([(3 * i + j) % VOCABULARY for j in range(4 + 3 * i)], [0] + [1] * (3 + 3 * i)) for i in range(7)]


def warm(trainer: Trainer, examples: list[Example], config: WarmupConfig = CONFIG, first: int = 0) -> list[float]:
    return [trainer.imitate(batch).values["loss"] for batch in batches(examples, config, 0, first)]


@pytest.mark.slow
def test_it_learns_what_the_masks_show(tmp_path: Path) -> None:
    trainer = Trainer(save_tiny(tmp_path / "model"), TrainingConfig())
    losses = warm(trainer, EXAMPLES)
    assert len(losses) == trainer.version == 80
    assert losses[-1] < 0.2 < 2.0 < losses[0]
    save_checkpoint(trainer, tmp_path / "checkpoint").result()
    export_model(tmp_path / "checkpoint", tmp_path / "warm")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "warm")
    with torch.no_grad():
        guesses = [model(torch.tensor([example.tokens[:-1]])).logits[0, -1].argmax().item() for example in EXAMPLES]
    assert guesses == [example.tokens[-1] for example in EXAMPLES]


def test_the_loss_is_the_mean_over_the_trained_tokens_of_all_passes(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    total = torch.zeros(())
    for example in UNEVEN:
        tokens, mask = torch.tensor([example.tokens]), torch.tensor(example.mask[1:]).bool()
        losses = functional.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:], reduction="none")
        total = total + losses[mask].sum()
    mean = total / sum(sum(example.mask) for example in UNEVEN)
    mean.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    trainer = Trainer(folder, TrainingConfig(pack_tokens=30))  # several passes
    values = trainer.imitate(ExampleBatch(0, 1e-3, tuple(UNEVEN))).values
    assert values["loss"] == pytest.approx(mean.item(), rel=1e-5)
    assert values["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert values["lr"] == 1e-3  # not that of RL, which rises over its first steps


def test_a_step_that_cannot_be_taken_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    trainer = Trainer(save_tiny(tmp_path / "model"), TrainingConfig())
    before = trainer.snapshot()[1]
    with pytest.raises(RollartError, match="for version 3, but the trainer is at version 0"):
        trainer.imitate(ExampleBatch(3, 1e-3, tuple(EXAMPLES)))
    with pytest.raises(ValueError, match="no token whose mask is 1"):
        trainer.imitate(ExampleBatch(0, 1e-3, (Example([1, 2], [0, 0]),)))
    with pytest.raises(ValueError, match="2 tokens and 1 mask bits"):
        trainer.imitate(ExampleBatch(0, 1e-3, (Example([1, 2], [1]),)))
    assert trainer.version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.snapshot()[1].items())


def test_a_checkpoint_in_the_middle_gives_the_same_weights(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"steps": 6})
    folder = save_tiny(tmp_path / "model")
    whole = Trainer(folder, TrainingConfig())
    warm(whole, EXAMPLES, config)
    first = Trainer(folder, TrainingConfig())
    for batch in list(batches(EXAMPLES, config, 0))[:4]:
        first.imitate(batch)
    save_checkpoint(first, tmp_path / "4").result()
    second = Trainer(folder, TrainingConfig())
    load_checkpoint(second, tmp_path / "4")
    warm(second, EXAMPLES, config, first=second.version)
    expected, got = whole.snapshot(), second.snapshot()
    assert expected[0] == got[0] == 6
    assert all(torch.equal(expected[1][name], tensor) for name, tensor in got[1].items())


def _warmed(trainer: Trainer) -> tuple[list[float], dict[str, Any]]:
    losses = warm(trainer, UNEVEN, WarmupConfig(steps=4, batch=7, lr=1e-3))
    return losses, {name: tensor.numpy() for name, tensor in trainer.snapshot()[1].items()}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"context": 2}, {"tensor": 2}], ids=["data", "context", "tensor"])
def test_two_ranks_give_the_weights_of_one(tmp_path: Path, parallel: dict[str, int]) -> None:
    """Seven examples: in the last pass a rank may have nothing."""
    folder = save_tiny(tmp_path / "model")
    expected_losses, expected = _warmed(Trainer(folder, TrainingConfig(pack_tokens=40)))
    config = TrainingConfig(pack_tokens=40, parallel=ParallelConfig(**parallel))
    losses, weights = on_ranks(2, folder, config, _warmed)
    assert losses == pytest.approx(expected_losses, abs=1e-4)
    assert weights.keys() == expected.keys()
    worst = max(abs(weights[name] - expected[name]).max() for name in expected)
    assert worst <= 1e-4
