"""Trajectories as training samples."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from hashlib import blake2b
from typing import cast
from zlib import crc32

import msgspec
from msgspec import structs

from rollart.core.column import Column
from rollart.core.events import BatchTaken, TrajectoryEnded
from rollart.core.expert_choice import ExpertChoices, join
from rollart.core.packed import PackedTrajectory
from rollart.core.types import Batch, Outcome, Sample, SampleGroup, TokenRole, Trajectory, Turn, TurnSpan
from rollart.rollout.groups import Group
from rollart.rollout.ledger import TrajectoryCodec

_encode = msgspec.msgpack.Encoder().encode
PROMPT, ACTION, OBSERVATION = (bytes([role]) for role in TokenRole)


def sample_group(group: Group) -> SampleGroup:
    return SampleGroup(group.id, group.task, tuple(each for trajectory in group.done for each in samples(trajectory)))


def trained_members(group: Group, samples: SampleGroup) -> dict[int, int]:
    """The members of a group in the order of their samples, each with a checksum of them."""
    sums = {each.id: each.checksum if isinstance(each, PackedTrajectory) else 0 for each in group.done}
    for sample in samples.samples:
        if not isinstance(sample, msgspec.Raw):
            sums[sample.owner] = crc32(_encode(sample), sums[sample.owner])
    return {trajectory.member: sums[trajectory.id] for trajectory in group.done}


def batch_taken(step: int, groups: Sequence[Group], batch: Batch, waited: float) -> BatchTaken:
    staleness: Counter[int] = Counter()
    for group in groups:
        staleness.update(max(0, step - (t.oldest if t.oldest is not None else step)) for t in group.done)
    return BatchTaken(
        step=step,
        ids=[group.id for group in groups],
        groups=Counter(group.task for group in groups),
        trajectories=sum(len(group.done) for group in groups),
        tokens=sum(t.total_tokens for group in groups for t in group.done),
        waited_s=waited,
        staleness=staleness,
        members=[trained_members(*pair) for pair in zip(groups, batch.groups, strict=True)],
    )


def trajectory_ended(trajectory: Trajectory, *, held_out: bool) -> TrajectoryEnded:
    return TrajectoryEnded(
        trajectory=trajectory.id,
        task=trajectory.task,
        group=trajectory.group,
        outcome=trajectory.outcome,
        turns=len(trajectory.turns),
        tokens=trajectory.total_tokens,
        seconds=trajectory.seconds,
        reward=trajectory.reward,
        success=trajectory.success,
        reason=trajectory.reason,
        held_out=held_out,
        action_tokens=trajectory.action_tokens,
        parts=trajectory.parts,
    )


def samples(trajectory: Trajectory) -> list[Sample]:
    """One per segment. A segment is one sequence, so its history is trained once, not once per turn; what two segments
    share is trained in the first and a prompt in the second. Those of a packed trajectory stay encoded: a message takes
    them as they are."""
    if trajectory.reward is None or not trajectory.outcome.trainable:
        raise ValueError(f"trajectory {trajectory.id} ended as {trajectory.outcome} and cannot be trained")
    if isinstance(trajectory, PackedTrajectory):
        return cast(list[Sample], [msgspec.Raw(sample) for sample in trajectory.samples])
    segments: dict[int, _Segment] = {}
    for number, turn in enumerate(trajectory.turns):
        segments.setdefault(turn.segment, _Segment()).add(number, turn)
    return _samples(trajectory, segments)


class TrajectoryPacker:
    """Packs a trajectory for another process, which needs the outcome and passes on the rest. It does so turn by turn:
    at the end of a long trajectory, most of its numbers have left the processor's caches."""

    def __init__(self, codec: TrajectoryCodec) -> None:
        self._codec = codec
        self._segments: dict[int, _Segment] = {}
        self._turns: list[msgspec.Raw] = []

    def add(self, turn: Turn) -> None:
        """The next turn."""
        self._segments.setdefault(turn.segment, _Segment()).add(len(self._turns), turn)
        self._turns.append(msgspec.Raw(_encode(turn)))

    def pack(self, trajectory: Trajectory) -> PackedTrajectory:
        """With the turns that were added."""
        made = _samples(trajectory, self._segments) if trajectory.outcome.trainable else []
        encoded = [_encode(sample) for sample in made]
        body = structs.replace(trajectory, turns=cast(tuple[Turn, ...], tuple(self._turns)))
        return PackedTrajectory(
            **structs.asdict(structs.replace(trajectory, turns=(), info={}, teaching=())),
            body=self._codec.encode(body),
            samples=tuple(encoded),
            checksum=reduce(lambda before, sample: crc32(sample, before), encoded, 0),
            turn_count=len(self._turns),
            oldest_version=trajectory.oldest,
            sampled_tokens=trajectory.action_tokens,
            all_tokens=trajectory.total_tokens,
        )


class _Segment:
    """The turns of one segment, as the columns of a sample."""

    def __init__(self) -> None:
        self._tokens, self._logprobs, self._versions = array("i"), array("f"), array("i")
        self._roles = bytearray()
        self._spans: list[TurnSpan] = []
        self._experts: list[ExpertChoices | None] = []

    def add(self, number: int, turn: Turn) -> None:
        self._roles += (OBSERVATION if self._spans else PROMPT) * len(turn.prompt) + ACTION * len(turn.tokens)
        self._tokens += array("i", turn.prompt)
        start = len(self._tokens)
        self._tokens += array("i", turn.tokens)
        self._logprobs += array("f", turn.logprobs)
        self._versions += array("i", turn.versions)
        self._spans.append(TurnSpan(number, start, len(self._tokens), turn.reward or 0.0, state_key(turn)))
        self._experts.append(turn.experts)

    def sample(self, trajectory: Trajectory, id: str, owner: str) -> Sample:
        spans, last = list(self._spans), len(trajectory.turns) - 1
        if spans and spans[-1].number == last and trajectory.outcome is Outcome.FINISHED:
            spans[-1] = structs.replace(spans[-1], done=True)
        assert trajectory.reward is not None
        return Sample(
            id=id,
            task=trajectory.task,
            tokens=Column("i4", self._tokens.tobytes()),
            roles=Column("u1", bytes(self._roles)),
            logprobs=Column("f4", self._logprobs.tobytes()),
            versions=Column("i4", self._versions.tobytes()),
            reward=trajectory.reward,
            truncated=trajectory.outcome is Outcome.TRUNCATED,
            temperature=trajectory.temperature,
            trajectory=owner,
            turns=tuple(spans),
            experts=join(self._experts, len(self._tokens)),
        )


def _samples(trajectory: Trajectory, segments: dict[int, _Segment]) -> list[Sample]:
    first, *others = segments.values() or [_Segment()]
    made = [
        first.sample(trajectory, trajectory.id, ""),
        *(each.sample(trajectory, f"{trajectory.id}/{number}", trajectory.id) for number, each in enumerate(others, 1)),
    ]
    if not trajectory.teaching:
        return made
    return [replace(sample, teacher=one) for sample, one in zip(made, trajectory.teaching, strict=True)]


def state_key(turn: Turn) -> str:
    """Equal for turns that saw the same messages; not more than that, whatever the turns before them were."""
    digest = blake2b(digest_size=8)
    for message in turn.messages:
        digest.update(f"{message.role}\0{message.content}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()
