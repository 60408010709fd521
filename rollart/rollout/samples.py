"""Trajectories as training samples."""

from rollart.core.expert_choice import join
from rollart.core.types import Outcome, Sample, SampleGroup, Trajectory, Turn
from rollart.rollout.groups import Group


def sample_group(group: Group) -> SampleGroup:
    return SampleGroup(group.id, group.task, tuple(each for trajectory in group.done for each in samples(trajectory)))


def samples(trajectory: Trajectory) -> list[Sample]:
    """One per segment. A segment is one sequence, so its history is trained once, not once per turn; what two segments
    share is trained in the first and a prompt in the second."""
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
        observed, sampled = len(turn.prompt), len(turn.tokens)
        tokens += turn.prompt + turn.tokens
        mask += [0] * observed + [1] * sampled
        logprobs += [0.0] * observed
        logprobs += turn.logprobs
        versions += [-1] * observed
        versions += turn.versions
    return Sample(
        id=id,
        task=trajectory.task,
        tokens=tokens,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        reward=reward,
        truncated=trajectory.outcome is Outcome.TRUNCATED,
        temperature=trajectory.temperature,
        trajectory=owner,
        experts=join((turn.experts for turn in turns), len(tokens)),
    )
