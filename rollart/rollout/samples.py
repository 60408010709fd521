"""Trajectories as training samples."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from hashlib import blake2b
from typing import cast
from zlib import crc32

import msgspec
from msgspec import structs

from rollart.core.column import Column
from rollart.core.events import BatchTaken, TrajectoryEnded
from rollart.core.expert_choice import join
from rollart.core.packed import PackedTrajectory, encoded_checksum, trained, turn_count
from rollart.core.types import Outcome, Sample, SampleGroup, TokenRole, Trajectory, Turn, TurnSpan
from rollart.rollout.groups import Group, PreparedGroup
from rollart.rollout.ledger import TrajectoryCodec

_encode = msgspec.msgpack.Encoder().encode
PROMPT, ACTION, OBSERVATION = (bytes([role]) for role in TokenRole)


def sample_group(group: Group) -> SampleGroup:
    """Samples of packed trajectories stay encoded: the message to the trainer takes them as they are."""
    found = (each for trajectory in group.done for each in trained(trajectory, samples))
    return SampleGroup(group.id, group.task, tuple(cast(Iterable[Sample], found)))


def trained_members(group: Group, samples: SampleGroup) -> dict[int, int]:
    """The members of a group in the order of their samples, each with a checksum of them."""
    sums = {each.id: encoded_checksum(each) for each in group.done}
    for sample in samples.samples:
        if not isinstance(sample, msgspec.Raw):  # what is encoded has its checksum
            sums[sample.owner] = crc32(_encode(sample), sums[sample.owner])
    return {trajectory.member: sums[trajectory.id] for trajectory in group.done}


def prepare(group: Group, to_samples: Callable[[Group], SampleGroup]) -> PreparedGroup:
    """Done when the group is complete, while a step is trained: the trainer waits for what is done after it."""
    made = to_samples(group)
    return PreparedGroup(made, trained_members(group, made))


def batch_taken(step: int, groups: Sequence[Group], members: list[dict[int, int]], waited: float) -> BatchTaken:
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
        members=members,
    )


def trajectory_ended(trajectory: Trajectory, *, held_out: bool) -> TrajectoryEnded:
    return TrajectoryEnded(
        trajectory=trajectory.id,
        task=trajectory.task,
        group=trajectory.group,
        outcome=trajectory.outcome,
        turns=turn_count(trajectory),
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
    share is trained in the first and a prompt in the second."""
    if trajectory.reward is None or not trajectory.outcome.trainable:
        raise ValueError(f"trajectory {trajectory.id} ended as {trajectory.outcome} and cannot be trained")
    segments: dict[int, list[tuple[int, Turn]]] = {}
    for number, turn in enumerate(trajectory.turns):
        segments.setdefault(turn.segment, []).append((number, turn))
    first, *others = segments.values() or [[]]
    made = [
        _sample(trajectory, trajectory.reward, first, trajectory.id, ""),
        *(
            _sample(trajectory, trajectory.reward, turns, f"{trajectory.id}/{number}", trajectory.id)
            for number, turns in enumerate(others, 1)
        ),
    ]
    if not trajectory.teaching:
        return made
    return [replace(sample, teacher=one) for sample, one in zip(made, trajectory.teaching, strict=True)]


def pack(trajectory: Trajectory, codec: TrajectoryCodec) -> PackedTrajectory:
    """For another process, which needs the outcome and passes on the rest."""
    encoded = [_encode(sample) for sample in samples(trajectory)] if trajectory.outcome.trainable else []
    header = structs.asdict(structs.replace(trajectory, turns=(), info={}, teaching=()))
    return PackedTrajectory(
        **header,
        body=codec.encode(trajectory),
        samples=tuple(encoded),
        checksum=reduce(lambda before, sample: crc32(sample, before), encoded, 0),
        turn_count=len(trajectory.turns),
        oldest_version=trajectory.oldest,
        sampled_tokens=trajectory.action_tokens,
        all_tokens=trajectory.total_tokens,
    )


def _sample(trajectory: Trajectory, reward: float, turns: Sequence[tuple[int, Turn]], id: str, owner: str) -> Sample:
    """Of the numbered turns of one segment."""
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    roles = bytearray()
    spans: list[TurnSpan] = []
    last = len(trajectory.turns) - 1
    for number, turn in turns:
        roles += (OBSERVATION if spans else PROMPT) * len(turn.prompt) + ACTION * len(turn.tokens)
        tokens += turn.prompt
        spans.append(
            TurnSpan(
                number=number,
                start=len(tokens),
                stop=len(tokens) + len(turn.tokens),
                reward=turn.reward or 0.0,
                state=state_key(turn),
                done=number == last and trajectory.outcome is Outcome.FINISHED,
            )
        )
        tokens += turn.tokens
        logprobs += turn.logprobs
        versions += turn.versions
    return Sample(
        id=id,
        task=trajectory.task,
        tokens=Column.ints(tokens),
        roles=Column("u1", bytes(roles)),
        logprobs=Column.floats(logprobs),
        versions=Column.ints(versions),
        reward=reward,
        truncated=trajectory.outcome is Outcome.TRUNCATED,
        temperature=trajectory.temperature,
        trajectory=owner,
        turns=tuple(spans),
        experts=join((turn.experts for _, turn in turns), len(tokens)),
    )


def state_key(turn: Turn) -> str:
    """Equal for turns that saw the same messages; not more than that, whatever the turns before them were."""
    digest = blake2b(digest_size=8)
    for message in turn.messages:
        digest.update(f"{message.role}\0{message.content}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()
