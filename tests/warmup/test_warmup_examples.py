from collections import Counter
from pathlib import Path

import pytest

from rollart.config import WarmupConfig
from rollart.core.types import Example
from rollart.warmup.examples import StoredExamples, batches, schedule, write_examples

EXAMPLES = [Example([number, 70_000 + number] * (number + 1), [0, 1] * (number + 1)) for number in range(10)]


def test_examples_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert write_examples(tmp_path, [(example.tokens, example.mask) for example in EXAMPLES]) == 10
    stored = StoredExamples(tmp_path)
    assert list(stored) == EXAMPLES
    assert (stored[-1], stored[2:4]) == (EXAMPLES[-1], EXAMPLES[2:4])
    with pytest.raises(IndexError):
        stored[10]


def test_a_round_shows_every_example_once() -> None:
    config = WarmupConfig(steps=5, batch=4)
    made = list(batches(EXAMPLES, config, seed=0))
    assert [batch.step for batch in made] == [0, 1, 2, 3, 4]
    shown = Counter(example.tokens[0] for batch in made for example in batch.examples)
    assert set(shown.values()) == {2}
    assert [batch.rate for batch in made] == [config.lr * schedule(step, 5) for step in range(5)]


def test_batches_depend_on_the_seed_and_the_step_alone() -> None:
    config = WarmupConfig(steps=9, batch=3)
    whole = list(batches(EXAMPLES, config, seed=1))
    assert list(batches(EXAMPLES, config, seed=1, first=4)) == whole[4:]
    assert list(batches(EXAMPLES, config, seed=2)) != whole


def test_the_rate_rises_then_falls_to_a_tenth() -> None:
    rates = [schedule(step, 100) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
