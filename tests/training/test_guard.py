"""Each fault is planted between the real engine and the real trainer; the guard sees only what a step reports."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest
import torch
from tiny_models import VOCABULARY, save_tiny

from rollart.config import AlgorithmConfig, CorrectionConfig, EngineConfig, TrainingConfig
from rollart.core.column import Column
from rollart.core.types import Batch, GenerationRequest, Sample, SampleGroup, Sampling, StepMetrics
from rollart.engines.torch.model import EngineModel
from rollart.engines.torch.stepper import Stepper
from rollart.training.guard import REPEAT_STEPS, Guard, GuardState
from rollart.training.logprob_gap import Cell, GapRow
from rollart.training.packing import pack
from rollart.training.trainer import Trainer

CONVERSATIONS, ANSWER, QUESTION = 8, 12, 6
Spoil = Callable[[Sample], Sample]


@dataclass
class Talk:
    """A conversation so far, as the trainer will see it."""

    name: str
    tokens: list[int]
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def observe(self, tokens: list[int]) -> None:
        self.mask += [0] * len(tokens)


class Loop:
    """An engine and a trainer with the same tiny model. `trained_at` is the temperature given to the trainer."""

    def __init__(
        self,
        folder: Path,
        *,
        trained_at: float = 1.0,
        on_swap: str = "recompute",
        algorithm: AlgorithmConfig | None = None,
        **sampling: float,
    ) -> None:
        model = EngineModel.open(save_tiny(folder, initializer_range=0.3), torch.float32, "cpu")
        self.engine = Stepper(model, EngineConfig(on_swap=on_swap))  # type: ignore[arg-type]
        config = TrainingConfig(lr=3e-3, lr_warmup=0, algorithm=algorithm or AlgorithmConfig())
        self.trainer = Trainer(folder, config)
        self.trained_at, self.sampling = trained_at, Sampling(max_tokens=ANSWER, **sampling)  # type: ignore[arg-type]
        self.warnings: list[str] = []
        self._model, self._draw, self._names = model, random.Random(0), 0

    def begin(self, count: int = CONVERSATIONS) -> list[Talk]:
        talks = []
        for _ in range(count):
            question = self._question()
            talks.append(Talk(str(self._names), question))
            talks[-1].observe(question)
            self._names += 1
        return talks

    def answer(self, talks: Sequence[Talk]) -> None:
        """One turn of every conversation."""
        for talk in talks:
            sampling = msgspec.structs.replace(self.sampling, seed=self._draw.randrange(1 << 30))
            request = GenerationRequest(talk.name, talk.name, "t", 0, list(talk.tokens), sampling)
            self.engine.add(self.engine.accept(request))
        while self.engine.busy:
            self.engine.step()
        done = {sequence.id: sequence.completion() for sequence in self.engine.ended()}
        for talk in talks:
            completion = done[talk.name]
            talk.tokens += completion.tokens
            talk.mask += [1] * len(completion.tokens)
            talk.logprobs += completion.logprobs
            talk.versions += completion.versions

    def ask(self, talks: Sequence[Talk]) -> None:
        for talk in talks:
            question = self._question()
            talk.tokens += question
            talk.observe(question)

    def train(self, talks: Sequence[Talk], spoil: Spoil = lambda sample: sample) -> StepMetrics:
        samples = [
            Sample(
                id=talk.name,
                task="t",
                tokens=Column.ints(talk.tokens),
                roles=Column.flags(talk.mask),
                logprobs=Column.floats(talk.logprobs),
                versions=Column.ints(talk.versions),
                reward=float(n % 2),
                temperature=self.trained_at,
            )
            for n, talk in enumerate(talks)
        ]
        group = SampleGroup("g", "t", tuple(map(spoil, samples)))
        metrics = self.trainer.step(Batch(self.trainer.version, (group,)))
        self.warnings += metrics.warnings
        return metrics

    def swap(self) -> None:
        version, tensors = self.trainer.snapshot()
        self.engine.swap(version, self._model.prepare(tensors))

    def round(self, spoil: Spoil = lambda sample: sample) -> StepMetrics:
        """Two steps, with a swap in the middle of conversations. The first is plain and only moves the weights; half of
        the second's conversations began before it."""
        old, plain = self.begin(), self.begin()
        self.answer(old + plain)
        self.train(plain)
        self.swap()
        self.ask(old)
        new = self.begin()
        self.answer(old + new)
        metrics = self.train(old + new, spoil)
        self.swap()
        return metrics

    def _question(self) -> list[int]:
        return [self._draw.randrange(VOCABULARY) for _ in range(QUESTION)]


def gap(metrics: StepMetrics, age: int) -> float:
    return next(row.mean for row in metrics.gaps if row.age == age)


def test_a_healthy_run_is_silent_and_its_fresh_tokens_agree(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for _ in range(8):
        metrics = loop.round()
        assert gap(metrics, 0) < 1e-5
        assert gap(metrics, 1) > 1e-2
    assert loop.warnings == []
    assert {row.age: row.tokens for row in metrics.gaps} == {0: 2 * CONVERSATIONS * ANSWER, 1: CONVERSATIONS * ANSWER}
    assert all(row.max >= row.mean for row in metrics.gaps)


def test_a_temperature_that_the_trainer_knows_is_no_fault(tmp_path: Path) -> None:
    loop = Loop(tmp_path, trained_at=0.6, temperature=0.6)
    loop.round()
    assert loop.warnings == []


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.25, 2.0])
def test_a_wrong_temperature_is_named_with_its_factor(tmp_path: Path, temperature: float) -> None:
    loop = Loop(tmp_path, temperature=temperature)
    loop.round()
    (warning,) = loop.warnings
    assert warning.startswith("temperature: in task t")
    factor = float(warning.partition("sampled at ")[2].split()[0])
    assert factor == pytest.approx(temperature, rel=0.3)


def test_logprobs_before_temperature_are_named_as_a_temperature(tmp_path: Path) -> None:
    loop = Loop(tmp_path, trained_at=0.6, temperature=0.6)

    def raw(sample: Sample) -> Sample:
        with torch.no_grad():
            values, _ = loop.trainer.learner.policy.logprobs(pack([sample.tokens.array], [sample.mask]))
        return replace(sample, logprobs=Column.floats(values.numpy()))

    loop.round(raw)
    (warning,) = loop.warnings
    assert warning.startswith("temperature") and "processed_logprobs" in warning


@pytest.mark.parametrize("cut", [{"top_k": 4}, {"top_p": 0.7}])
def test_a_vocabulary_that_only_the_engine_cuts_is_named(tmp_path: Path, cut: dict[str, float]) -> None:
    loop = Loop(tmp_path, **cut)
    loop.round()
    (warning,) = loop.warnings
    assert warning.startswith("top-k or top-p")


def test_kv_kept_from_older_weights_is_named(tmp_path: Path) -> None:
    loop = Loop(tmp_path, on_swap="keep")
    loop.round()
    (warning,) = loop.warnings
    assert warning.startswith("stale KV") and "engine.on_swap" in warning and "prefix cache" in warning


def test_kv_kept_where_every_conversation_is_older_is_named(tmp_path: Path) -> None:
    loop = Loop(tmp_path, on_swap="keep")
    old, plain = loop.begin(), loop.begin()
    loop.answer(old + plain)
    loop.train(plain)
    loop.swap()
    loop.ask(old)
    loop.answer(old)
    loop.train(old)
    (warning,) = loop.warnings
    assert warning.startswith("stale KV")


def test_tokens_that_all_carry_the_newest_version_are_named(tmp_path: Path) -> None:
    def stamped_at_the_end(sample: Sample) -> Sample:
        made = sample.versions.array
        return replace(sample, versions=Column.ints(made * 0 + made.max()))

    loop = Loop(tmp_path)
    loop.round(stamped_at_the_end)
    (warning,) = loop.warnings
    assert warning.startswith("version label")


def test_an_engine_that_never_swapped_is_named(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    talks, plain = loop.begin(), loop.begin()
    loop.answer(plain)
    loop.train(plain)
    loop.answer(talks)
    loop.train(talks, lambda sample: replace(sample, versions=Column.ints(sample.versions.array + 1)))
    (warning,) = loop.warnings
    assert warning.startswith("version label") and "swapped later than it says" in warning


def test_versions_that_are_swapped_are_named(tmp_path: Path) -> None:
    def exchanged(sample: Sample) -> Sample:
        return replace(sample, versions=Column.ints(1 - sample.versions.array))

    loop = Loop(tmp_path)
    loop.round(exchanged)
    (warning,) = loop.warnings
    assert warning.startswith("version label") and "mixed up" in warning


def test_a_fault_is_reported_again_only_after_a_while() -> None:
    guard, rows = Guard(), [row(age=0, mean=0.2)]
    assert [bool(guard.check(step, rows)) for step in range(REPEAT_STEPS + 1)] == [True] + [False] * (
        REPEAT_STEPS - 1
    ) + [True]


def test_an_engine_in_bfloat16_may_round_more() -> None:
    rows = [row(age=0, mean=0.015)]
    assert Guard("float32").check(0, rows)
    assert not Guard("bfloat16").check(0, rows)


def test_older_tokens_that_leave_their_usual_range_are_named() -> None:
    guard = Guard()
    for step in range(6):
        assert not guard.check(step, [row(age=1, mean=0.02)])
    (warning,) = guard.check(6, [row(age=1, mean=0.4)])
    assert warning.startswith("drift") and "20 times" in warning and "training.lr" in warning


# Tokens of age 1, their mean gap, its standard error, and the mean reward of the step; of a tiny model with AdamW from
# random weights, 36 answers of 12 tokens a step: the share of tokens that are 1 modulo 4 is rewarded.
LEARNT_AT_1E_2 = [
    (396, 0.6714, 0.0373, 0.3704),
    (432, 0.4538, 0.0243, 0.537),
    (396, 0.3241, 0.0173, 0.5671),
    (384, 0.1227, 0.0091, 0.8009),
    (384, 0.1675, 0.0178, 0.8958),
    (408, 0.1281, 0.01, 0.8032),
]
LEARNT_AT_3E_2 = [
    (396, 1.5567, 0.0725, 0.3704),
    (420, 1.7085, 0.0812, 0.5347),
    (432, 0.3299, 0.049, 0.9421),
    (432, 0.034, 0.0076, 0.9861),
]
# The same with a reward that the model does not learn: 0.125 is chance.
RUINED_AT_3E_2 = [
    (408, 1.7546, 0.0837, 0.1319),
    (408, 2.191, 0.0988, 0.1597),
    (432, 0.6898, 0.031, 0.1042),
    (420, 0.6467, 0.0374, 0.1389),
    (240, 0.6374, 0.0525, 0.1181),
]
RUINED_AT_1E_1 = [
    (408, 3.2659, 0.1214, 0.1319),
    (360, 3.4458, 0.1117, 0.1574),
    (384, 0.9333, 0.0635, 0.1111),
    (432, 0.5134, 0.0384, 0.1181),
    (432, 2.4972, 0.1188, 0.1389),
]


def replayed(recorded: Sequence[tuple[int, float, float, float]], first_reward: float) -> list[list[str]]:
    """The warnings of each step. Nothing is older than the weights at the first."""
    guard = Guard()
    warnings = [[*guard.check(0, [row(age=0, mean=1e-6)], {"t": first_reward})]]
    for step, (tokens, mean, error, reward) in enumerate(recorded, 1):
        spread = tokens * (mean**2 + tokens * error**2)
        gaps = replace(row(age=1, mean=mean, tokens=tokens), gap_gap=spread)
        warnings.append([*guard.check(step, [gaps], {"t": reward})])
    return warnings


@pytest.mark.parametrize("recorded", [LEARNT_AT_1E_2, LEARNT_AT_3E_2])
def test_a_run_that_learns_fast_is_not_called_ruined(recorded: list[tuple[int, float, float, float]]) -> None:
    assert not any(replayed(recorded, first_reward=0.2662))


@pytest.mark.parametrize("recorded", [RUINED_AT_3E_2, RUINED_AT_1E_1])
def test_updates_that_keep_leaping_without_a_gain_are_named(recorded: list[tuple[int, float, float, float]]) -> None:
    found = [(step, text) for step, texts in enumerate(replayed(recorded, first_reward=0.1204)) for text in texts]
    ((step, warning),) = found
    assert step == 4 and warning.startswith("drift: in task t each update moves the policy too far")
    assert "for 4 steps without a rising reward" in warning and "training.lr" in warning


def test_a_reward_that_rose_and_fell_again_is_no_gain() -> None:
    guard, rewards = Guard(), [0.2, 0.3, 0.5, 0.6, 0.6, 0.6, 0.3, 0.25, 0.2, 0.2]
    said = [bool(guard.check(step, [row(age=1, mean=0.5)], {"t": each})) for step, each in enumerate(rewards)]
    assert said.index(True) in (7, 8)
    assert not any(Guard().check(step, [row(age=4, mean=0.5)], {"t": 0.2}) for step in range(9)), "four updates may"


def test_a_resumed_guard_goes_on_counting() -> None:
    first, second = Guard(), Guard()
    for step in range(3):
        assert not first.check(step, [row(age=1, mean=0.5)], {"t": 0.2})
    second.restore(msgspec.json.decode(msgspec.json.encode(first.state()), type=GuardState))
    assert second.check(3, [row(age=1, mean=0.5)], {"t": 0.2})


def test_older_tokens_may_drift_with_the_policy() -> None:
    guard = Guard()
    for step in range(30):
        assert not guard.check(step, [row(age=1, mean=0.02 * 1.1**step)])


def test_a_few_older_tokens_far_off_are_no_drift() -> None:
    guard = Guard()
    for step in range(6):
        assert not guard.check(step, [row(age=1, mean=0.02)])
    few = row(age=1, mean=0.4, tokens=20)
    assert not guard.check(6, [replace(few, gap_gap=20 * few.mean * 20)])  # nearly all of it is one token's
    assert guard.check(7, [few])


def test_a_policy_that_gets_surer_of_itself_is_no_temperature() -> None:
    leans, tokens = 1000.0, 1000
    for factor, named in ((0.95, False), (0.8, True)):
        slope = -math.log(factor)
        gaps = GapRow(Cell("t", 1, False), tokens, 0.05 * tokens, 0.3, -0.2, slope * leans, leans, slope**2 * leans)
        assert bool(Guard().check(0, [gaps])) == named


@pytest.mark.parametrize(("factor", "words"), [(2.6, "far more certain"), (0.5, "far more random"), (1.3, None)])
def test_a_policy_that_collapses_is_not_taken_for_a_wrong_temperature(factor: float, words: str | None) -> None:
    leans, tokens, slope = 1000.0, 1000, -math.log(factor)
    gaps = GapRow(Cell("t", 1, False), tokens, 0.05 * tokens, 0.3, -0.2, slope * leans, leans, slope**2 * leans)
    guard = Guard()
    assert not guard.check(0, [row(age=0, mean=1e-6)])
    resumed = Guard()
    resumed.restore(msgspec.json.decode(msgspec.json.encode(guard.state()), type=GuardState))
    for each in (guard, resumed):
        warnings = each.check(1, [gaps])
        assert [warning.partition(":")[0] for warning in warnings] == (["drift"] if words else [])
        assert all(str(words) in warning and "lower training.lr" in warning for warning in warnings)
    (unknown,) = Guard().check(1, [gaps])
    assert unknown.startswith("temperature"), "no fresh token of the task ever agreed"


def test_a_handful_of_older_tokens_all_off_to_one_side_is_no_cut_vocabulary() -> None:
    for tokens, named in ((100, False), (1000, True)):
        gaps = replace(row(age=1, mean=0.1, tokens=tokens), lowest=0.01)
        assert bool(Guard().check(0, [gaps])) == named


def test_a_guard_that_comes_back_knows_what_is_usual_and_what_it_has_said() -> None:
    first, second = Guard(), Guard()
    for step in range(6):
        first.check(step, [row(age=1, mean=0.02)])
    assert first.check(6, [row(age=0, mean=0.2)])
    second.restore(msgspec.json.decode(msgspec.json.encode(first.state()), type=GuardState))
    assert not second.check(7, [row(age=0, mean=0.2)])
    (warning,) = second.check(8, [row(age=1, mean=0.4)])
    assert warning.startswith("drift") and "20 times" in warning


def row(*, age: int, mean: float, tokens: int = 100) -> GapRow:
    """Gaps of both signs that have nothing to do with temperature."""
    return GapRow(Cell("t", age, False), tokens, mean * tokens, 3 * mean, -2 * mean, 0.0, 1.0, mean**2 * tokens)


@pytest.mark.parametrize("cap", [None, 1.2, 100.0])
def test_the_correction_weighs_tokens_by_what_the_guard_sees(tmp_path: Path, cap: float | None) -> None:
    """At a wrong temperature: the weights are the trainer's probability over the engine's, truncated at the cap."""
    correction = CorrectionConfig(use=("token",), cap=cap) if cap else CorrectionConfig(use=())
    loop = Loop(tmp_path, temperature=1.5, algorithm=AlgorithmConfig(correction=correction))
    talks = loop.begin()
    loop.answer(talks)
    with torch.no_grad():
        packed = pack([talk.tokens for talk in talks], [talk.mask for talk in talks])
        ours = loop.trainer.learner.policy.logprobs(packed)[0]
    theirs = torch.tensor([p for talk in talks for p in talk.logprobs])
    ratio = (ours - theirs).exp()
    expected = ratio.clamp(max=cap).mean().item() if cap else 1.0
    assert loop.train(talks).values["importance"] == pytest.approx(expected, abs=1e-4)
    assert ratio.max() > 1.2
