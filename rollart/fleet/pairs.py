"""Pairs as batches of the training loop: what `rollart dpo` learns from in place of rollouts.

A pair is a group of two samples, of which the chosen has the reward 1 and the rejected 0. The batches follow from the
seed and the step, so a run that resumes goes on with those that it would have had.
"""

from collections.abc import Sequence
from itertools import islice

from jinja2 import TemplateError

from rollart.config import AlgorithmConfig, RunFile
from rollart.core.column import Column
from rollart.core.errors import ConfigError, RollartError
from rollart.core.events import EventSink, Warned
from rollart.core.seeds import seed_of
from rollart.core.types import Batch, EpisodeTurn, Sample, SampleGroup, TokenRole
from rollart.models.chat import ChatRenderer, conversation_tokens
from rollart.training.losses import LOSSES, Traits
from rollart.warmup.examples import shuffled
from rollart.warmup.pairs import Pair

NAME = "pairs"  # in place of a task


class PairSource:
    """Implements `rollart.rollout.training_loop.BatchSource`. Conversations are cut off at the longest `max_context` of
    the tasks; a pair whose answers do not begin by then is left out, and counted."""

    def __init__(self, run: RunFile, pairs: Sequence[Pair], renderer: ChatRenderer, sink: EventSink, step: int) -> None:
        self._pairs, self._renderer, self._sink, self._step = pairs, renderer, sink, step
        self._longest = max(task.max_context for task in run.tasks)
        order = shuffled(len(pairs), run.training.batch_groups, seed_of(run.seed, NAME))
        self._order = islice(order, step, None)

    async def take_batch(self) -> Batch:
        chosen = next(self._order)
        groups = [self._group(index) for index in chosen]
        usable = tuple(group for group in groups if group is not None)
        if not usable:
            raise RollartError(
                f"no pair of step {self._step} has answers that begin within the longest max_context of the tasks, "
                f"{self._longest} tokens; raise it"
            )
        if left_out := len(groups) - len(usable):
            what = f"{left_out} of {len(groups)} pairs of step {self._step} were left out"
            self._sink.emit(Warned(message=f"{what}: no answer begins within {self._longest} tokens"))
        return Batch(self._step, usable)

    def finish_step(self) -> None:
        self._step += 1

    async def prepare_swap(self, version: int) -> None:
        """Nothing is generated but evaluations."""

    def _group(self, index: int) -> SampleGroup | None:
        pair = self._pairs[index]
        samples = tuple(
            self._sample(f"{index}.{reward}", turns, pair.place, reward)
            for reward, turns in ((1, pair.chosen), (0, pair.rejected))
        )
        return SampleGroup(str(index), NAME, samples) if all(sample.actions for sample in samples) else None

    def _sample(self, id: str, turns: list[EpisodeTurn], place: str, reward: float) -> Sample:
        try:
            tokens, mask = conversation_tokens(self._renderer, turns)
        except TemplateError as error:
            raise ConfigError(f"{place}: the chat template of the model refuses it: {error}") from error
        tokens, mask = tokens[: self._longest], mask[: self._longest]
        actions = sum(mask)
        return Sample(
            id=id,
            task=NAME,
            tokens=Column.ints(tokens),
            roles=Column.flags([TokenRole.ACTION if learnt else TokenRole.PROMPT for learnt in mask]),
            logprobs=Column.floats([0.0] * actions),
            versions=Column.ints([self._step] * actions),
            reward=reward,
        )


def for_pairs(run: RunFile) -> RunFile:
    """The run with an algorithm for pairs: that of the run file, `dpo` if it names none. Raises ConfigError."""
    given = run.training.algorithm
    loss = given.loss if "loss" in given.model_fields_set else "dpo"
    if LOSSES.find(loss) not in Traits.of_pairs:
        known = " or ".join(name for name in LOSSES.names() if LOSSES.find(name) in Traits.of_pairs)
        raise ConfigError(f"training.algorithm.loss is {loss!r}, which is not a loss of pairs; use {known}")
    algorithm = AlgorithmConfig(
        loss=loss, beta=given.beta, kl=given.kl, entropy=given.entropy, aggregate="sequence", evidence_power=0.0
    )
    return run.model_copy(update={"training": run.training.model_copy(update={"algorithm": algorithm})})
