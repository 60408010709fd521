"""A trajectory of several segments: each is a sample, and nothing in it is trained twice."""

from rollart.core.types import Outcome, SampleGroup, Trajectory, Turn
from rollart.rollout.samples import samples


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
    assert (first.tokens, first.mask) == ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])
    assert (branch.tokens, branch.mask) == ([1, 2, 3, 4, 7, 8], [0, 0, 0, 0, 0, 1])
    assert (other.tokens, other.mask) == ([9, 9, 9], [0, 1, 1])
    assert first.versions == [-1, -1, 0, 0, -1, 2] and branch.logprobs[-1] == -8.0


def test_segments_know_their_trajectory_and_its_reward_counts_once() -> None:
    made = samples(FORKED)
    assert [sample.id for sample in made] == ["t", "t/1", "t/2"]
    assert {sample.owner for sample in made} == {"t"}
    assert SampleGroup("g", "task", tuple(made)).rewards == {"t": 1.0}


def test_a_trajectory_of_one_segment_is_one_sample_under_its_own_id() -> None:
    plain = Trajectory("t", "task", "g", 0, 0, Outcome.TRUNCATED, (turn((1,), (2,), 0), turn((3,), (4,), 0)), 0.5)
    (sample,) = samples(plain)
    assert (sample.id, sample.trajectory, sample.mask, sample.truncated) == ("t", "", [0, 1, 0, 1], True)
