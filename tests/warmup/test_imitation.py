from pathlib import Path

import pytest
import torch
from tiny_models import VOCABULARY, save_tiny
from transformers import AutoModelForCausalLM

from rollart.config import WarmupConfig
from rollart.warmup.imitation import imitate, schedule

CONFIG = WarmupConfig(demonstrations=1, steps=80, batch=12, lr=2e-2)
EXAMPLES = [([1, start, (start * 5) % VOCABULARY], [0, 0, 1]) for start in range(VOCABULARY)]


def test_a_warmup_learns_what_the_masks_show_and_saves_a_model_folder(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model")
    reports: list[tuple[int, int, float]] = []
    last = imitate(source, tmp_path / "warm", EXAMPLES, CONFIG, on_step=lambda *report: reports.append(report))
    assert [step for step, _, _ in reports] == list(range(1, 81))
    assert last == reports[-1][2] < 0.2 < 2.0 < reports[0][2]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "warm")
    with torch.no_grad():
        guesses = [model(torch.tensor([tokens[:-1]])).logits[0, -1].argmax().item() for tokens, _ in EXAMPLES]
    assert guesses == [tokens[-1] for tokens, _ in EXAMPLES]
    assert "hello" in (tmp_path / "warm" / "tokenizer_config.json").read_text()


def test_a_warmup_in_place_is_the_same_as_one_to_another_folder(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model")
    config = CONFIG.model_copy(update={"steps": 3})
    losses = [imitate(source, output, EXAMPLES, config, seed=1) for output in (tmp_path / "warm", source)]
    assert losses[0] == losses[1]
    assert (source / "model.safetensors").read_bytes() == (tmp_path / "warm" / "model.safetensors").read_bytes()


def test_examples_without_anything_to_learn_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to learn"):
        imitate(tmp_path, tmp_path, [([1, 2], [0, 0])], CONFIG)


def test_the_rate_rises_then_falls_to_a_tenth() -> None:
    rates = [schedule(step, 100) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
