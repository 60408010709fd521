"""Pairs as batches of the training loop: what `rollart dpo` and `rollart reward-model` learn from in place of rollouts.

A pair is a group of two samples, of which the chosen has the reward 1 and the rejected 0. The batches follow from the
seed and the step, so a run that resumes goes on with those that it would have had. A policy is trained on the answers;
a reward model scores the whole conversation, at its last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from jinja2 import TemplateError

from rollart.config import AlgorithmConfig, RunFile
from rollart.core.column import Column
from rollart.core.errors import ConfigError, RollartError
from rollart.core.events import Evaluated, EventSink, Warned, WorkStarted
from rollart.core.seeds import seed_of
from rollart.core.types import Batch, EpisodeTurn, Sample, SampleGroup, TokenRole
from rollart.fleet.checkpoints import Checkpoints
from rollart.fleet.fleet import Fleet
from rollart.models.chat import ChatRenderer, conversation_tokens
from rollart.training.losses import LOSSES, Traits
from rollart.warmup.examples import shuffled
from rollart.warmup.pairs import Pair

NAME = "pairs"  # in place of a task


class PairSamples:
    """Pairs as groups. Conversations are cut off at the longest `max_context` of the tasks; a pair whose answers do not
    begin by then is None. `scored`: for a reward model."""

    def __init__(self, run: RunFile, renderer: ChatRenderer, *, scored: bool) -> None:
        self._renderer, self._scored = renderer, scored
        self.longest = max(task.max_context for task in run.tasks)

    def group(self, index: int, pair: Pair, step: int) -> SampleGroup | None:
        samples = tuple(
            self._sample(f"{index}.{reward}", turns, pair.place, reward, step)
            for reward, turns in ((1, pair.chosen), (0, pair.rejected))
        )
        return SampleGroup(str(index), NAME, samples) if all(sample.actions for sample in samples) else None

    def _sample(self, id: str, turns: list[EpisodeTurn], place: str, reward: float, step: int) -> Sample:
        try:
            tokens, mask = conversation_tokens(self._renderer, turns)
        except TemplateError as error:
            raise ConfigError(f"{place}: the chat template of the model refuses it: {error}") from error
        tokens, mask = tokens[: self.longest], mask[: self.longest]
        if self._scored and any(mask):
            # The score is that of the state before a trained token: one more, whichever, is behind the last.
            tokens, mask = [*tokens, tokens[-1]], [*[0] * len(mask), 1]
        actions = sum(mask)
        return Sample(
            id=id,
            task=NAME,
            tokens=Column.ints(tokens),
            roles=Column.flags([TokenRole.ACTION if learnt else TokenRole.PROMPT for learnt in mask]),
            logprobs=Column.floats([0.0] * actions),
            versions=Column.ints([step] * actions),
            reward=reward,
        )


@dataclass(frozen=True, slots=True)
class PairData:
    """The pairs to train on and those to measure with; `scored`: of a reward model."""

    trained: Sequence[Pair]
    held_out: Sequence[Pair] = ()
    scored: bool = False

    def samples(self, run: RunFile, renderer: ChatRenderer) -> PairSamples:
        return PairSamples(run, renderer, scored=self.scored)


class PairSource:
    """Implements `rollart.rollout.training_loop.BatchSource`. Pairs that cannot be used are left out, and counted."""

    def __init__(self, run: RunFile, pairs: Sequence[Pair], samples: PairSamples, sink: EventSink, step: int) -> None:
        self._pairs, self._samples, self._sink, self._step = pairs, samples, sink, step
        order = shuffled(len(pairs), run.training.batch_groups, seed_of(run.seed, NAME))
        self._order = islice(order, step, None)

    async def take_batch(self) -> Batch:
        chosen = next(self._order)
        groups = [self._samples.group(index, self._pairs[index], self._step) for index in chosen]
        usable = tuple(group for group in groups if group is not None)
        longest = self._samples.longest
        if not usable:
            raise RollartError(
                f"no pair of step {self._step} has answers that begin within the longest max_context of the tasks, "
                f"{longest} tokens; raise it"
            )
        if left_out := len(groups) - len(usable):
            what = f"{left_out} of {len(groups)} pairs of step {self._step} were left out"
            self._sink.emit(Warned(message=f"{what}: no answer begins within {longest} tokens"))
        return Batch(self._step, usable)

    def finish_step(self) -> None:
        self._step += 1

    async def prepare_swap(self, version: int) -> None:
        """Nothing is generated but evaluations."""


class PairEvaluator:
    """Implements `rollart.rollout.training_loop.HeldOut`: how well a reward model ranks pairs that it never trains on.
    Success is the share that it ranks right, the reward by how much."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        samples: PairSamples,
        fleet: Fleet,
        sink: EventSink,
        checkpoints: Checkpoints,
    ) -> None:
        self._pairs, self._samples, self._fleet = pairs, samples, fleet
        self._sink, self._checkpoints = sink, checkpoints

    async def run(self, version: int, episodes: int, *, label: str = "eval", final: bool = False) -> list[Evaluated]:
        found = (self._samples.group(n, pair, version) for n, pair in enumerate(islice(self._pairs, episodes)))
        groups = tuple(group for group in found if group is not None)
        if not groups:
            return []
        self._sink.emit(WorkStarted(work="evaluation", version=version))
        with self._checkpoints.evaluating(version):
            values = await self._fleet.trainer.compare(Batch(version, groups))
            result = Evaluated(
                version=version,
                task=NAME,
                episodes=len(groups),
                success=values["pair_accuracy"],
                reward=values["pair_margin"],
                failed=0,
                final=final,
            )
            self._sink.emit(result)
            self._checkpoints.evaluated(version, [result])
        return [result]


def split_pairs(pairs: Sequence[Pair], share: float, seed: int) -> tuple[Sequence[Pair], Sequence[Pair]]:
    """Those to train on and those that are held out, by how a conversation begins: answers to the same question are on
    the same side. Raises ConfigError if nothing is left on one."""
    limit = share * 2**31
    held_out = [seed_of(seed, "held out", *(m.content for m in pair.chosen[0].messages)) < limit for pair in pairs]
    sides = [[n for n, held in enumerate(held_out) if held is side] for side in (False, True)]
    if not sides[0] or (share and not sides[1]):
        what = "would be held out" if sides[1] else "can be held out"
        raise ConfigError(f"preference.held_out is {share:g}: {'all' if sides[1] else 'none'} of the pairs {what}")
    return _Chosen(pairs, sides[0]), _Chosen(pairs, sides[1])


class _Chosen(Sequence[Pair]):
    """Some of the pairs, read when they are needed."""

    def __init__(self, pairs: Sequence[Pair], chosen: Sequence[int]) -> None:
        self._pairs, self._chosen = pairs, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: Any) -> Any:
        return [self[n] for n in range(*index.indices(len(self)))] if isinstance(index, slice) else self._at(index)

    def _at(self, index: int) -> Pair:
        return self._pairs[self._chosen[index]]


def for_pairs(run: RunFile, *, scored: bool = False) -> RunFile:
    """The run with an algorithm for pairs: that of the run file; if it names none `dpo`, or `bradley_terry` if a reward
    model is trained. Raises ConfigError."""
    given = run.training.algorithm
    losses = [name for name in LOSSES.names() if LOSSES.find(name) in Traits.of_pairs]
    known = [name for name in losses if (LOSSES.find(name) in Traits.of_scores) is scored]
    loss = given.loss if "loss" in given.model_fields_set else known[0]
    function = LOSSES.find(loss)
    if function not in Traits.of_pairs or (function in Traits.of_scores) is not scored:
        what = "of scores of pairs" if scored else "of pairs"
        raise ConfigError(f"training.algorithm.loss is {loss!r}, which is not a loss {what}; use {' or '.join(known)}")
    algorithm = AlgorithmConfig(
        loss=loss, beta=given.beta, kl=given.kl, entropy=given.entropy, aggregate="sequence", evidence_power=0.0
    )
    return run.model_copy(update={"training": run.training.model_copy(update={"algorithm": algorithm})})
