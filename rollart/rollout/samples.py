"""From trajectories to what the trainer sees."""

from rollart.core.types import Outcome, Sample, SampleGroup, Trajectory, Turn
from rollart.rollout.groups import Group


def sample_group(group: Group) -> SampleGroup:
    return SampleGroup(group.id, group.task, tuple(each for trajectory in group.done for each in samples(trajectory)))


def samples(trajectory: Trajectory) -> list[Sample]:
    """One per segment. A segment is one sequence, so that its history is trained once, not once a turn; and what it
    shares with another is a prompt in one of them."""
    if trajectory.reward is None or not trajectory.outcome.trainable:
        raise ValueError(f"trajectory {trajectory.id} ended as {trajectory.outcome} and cannot be trained")
    segments: dict[int, list[Turn]] = {}
    for turn in trajectory.turns:
        segments.setdefault(turn.segment, []).append(turn)
    first, *others = segments.values() or [[]]
    return [
        _sample(trajectory, trajectory.reward, first, trajectory.id, ""),
        *(
            _sample(trajectory, trajectory.reward, turns, f"{trajectory.id}/{number}", trajectory.id)
            for number, turns in enumerate(others, 1)
        ),
    ]


def _sample(trajectory: Trajectory, reward: float, turns: list[Turn], id: str, owner: str) -> Sample:
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in turns:
        seen, made = len(turn.prompt), len(turn.tokens)
        tokens += turn.prompt + turn.tokens
        mask += [0] * seen + [1] * made
        logprobs += [0.0] * seen
        logprobs += turn.logprobs
        versions += [-1] * seen
        versions += turn.versions
    truncated = trajectory.outcome is Outcome.TRUNCATED
    return Sample(
        id, trajectory.task, tokens, mask, logprobs, versions, reward, truncated, trajectory.temperature, owner
    )
