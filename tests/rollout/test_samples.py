"""A trajectory of several segments: each is a sample, and nothing in it is trained twice."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from rollart.core.column import Column
from rollart.core.types import Message, Outcome, SampleGroup, Trajectory, Turn
from rollart.rollout.groups import Group
from rollart.rollout.ledger import GroupRecord, SqliteLedger, TrajectoryCodec
from rollart.rollout.samples import pack, sample_group, samples, state_key, trained_members


def values(column: Column) -> list[Any]:
    return list(column.array.tolist())


def turn(prompt: tuple[int, ...], tokens: tuple[int, ...], segment: int, version: int = 0) -> Turn:
    logprobs, versions = tuple(-float(token) for token in tokens), (version,) * len(tokens)
    return Turn((), prompt, "", tokens, logprobs, versions, "stop", segment=segment)


# A conversation (1 2) 3 4, continued by (5) 6; a second one branches off after 4; a third is about something else.
FORKED = Trajectory(
    "t",
    "task",
    "g",
    0,
    0,
    Outcome.FINISHED,
    (
        turn((1, 2), (3, 4), 0),
        turn((1, 2, 3, 4, 7), (8,), 1, version=1),
        turn((5,), (6,), 0, version=2),
        turn((9,), (9, 9), 4),
    ),
    reward=1.0,
)


def test_each_segment_is_a_sample_and_shared_beginnings_are_trained_once() -> None:
    first, branch, other = samples(FORKED)
    assert (values(first.tokens), values(first.roles)) == ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 2, 1])
    assert (values(branch.tokens), values(branch.roles)) == ([1, 2, 3, 4, 7, 8], [0, 0, 0, 0, 0, 1])
    assert (values(other.tokens), values(other.roles)) == ([9, 9, 9], [0, 1, 1])
    assert values(first.versions) == [0, 0, 2] and values(branch.logprobs) == [-8.0]


def test_turn_spans_have_their_place_in_the_sample_and_their_number_in_the_trajectory() -> None:
    first, branch, other = samples(FORKED)
    assert [(turn.number, turn.start, turn.stop) for turn in first.turns] == [(0, 2, 4), (2, 5, 6)]
    assert [(turn.number, turn.start, turn.stop) for turn in branch.turns] == [(1, 5, 6)]
    assert [turn.done for turn in other.turns] == [True]
    assert not any(turn.done for turn in (*first.turns, *branch.turns))


def test_turns_that_saw_the_same_messages_have_the_same_state() -> None:
    def seen(*contents: str) -> str:
        return state_key(replace(turn((1,), (2,), 0), messages=tuple(Message("user", text) for text in contents)))

    assert seen("a", "b") == seen("a", "b")
    assert len({seen("a", "b"), seen("ab"), seen("b", "a"), seen("")}) == 4


def test_segments_know_their_trajectory_and_its_reward_counts_once() -> None:
    made = samples(FORKED)
    assert [sample.id for sample in made] == ["t", "t/1", "t/2"]
    assert {sample.owner for sample in made} == {"t"}
    assert SampleGroup("g", "task", tuple(made)).rewards == {"t": 1.0}


def test_a_trajectory_of_one_segment_is_one_sample_under_its_own_id() -> None:
    plain = Trajectory("t", "task", "g", 0, 0, Outcome.TRUNCATED, (turn((1,), (2,), 0), turn((3,), (4,), 0)), 0.5)
    (sample,) = samples(plain)
    assert (sample.id, sample.trajectory, values(sample.roles), sample.truncated) == ("t", "", [0, 1, 2, 1], True)
    assert not any(turn.done for turn in sample.turns)


def test_a_packed_trajectory_gives_the_same_samples_checksums_and_record(tmp_path: Path) -> None:
    packed = pack(FORKED, TrajectoryCodec())
    group = Group.of(GroupRecord("g", "task", 0, 0, 1, 0), 0.0)
    made, sums = [], []
    for trajectory in (FORKED, packed):
        group.done = [trajectory]
        made.append(sample_group(group))
        sums.append(trained_members(group, made[-1]))
    encode, (whole, sent) = msgspec.msgpack.encode, made
    assert encode(sent) == encode(whole)
    assert msgspec.msgpack.decode(encode(sent), type=SampleGroup) == whole
    assert sums[0] == sums[1]
    for name in ("oldest", "action_tokens", "total_tokens", "reward", "outcome", "id"):
        assert getattr(packed, name) == getattr(FORKED, name)
    ledger = SqliteLedger.open(tmp_path / "ledger.sqlite")
    ledger.add(packed)
    assert ledger.trajectory("t") == FORKED
    assert [(row.turns, row.tokens) for row in ledger.latest(1)] == [(4, FORKED.total_tokens)]


def test_what_cannot_be_trained_has_no_samples_but_is_recorded() -> None:
    failed = pack(replace(FORKED, outcome=Outcome.ENV_FAILED, reward=None), TrajectoryCodec())
    assert failed.samples == ()
    assert failed.turn_count == 4
