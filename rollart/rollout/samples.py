"""From trajectories to what the trainer sees."""

from rollart.rollout.groups import Group
from rollart.types import Outcome, Sample, SampleGroup, Trajectory


def sample_group(group: Group) -> SampleGroup:
    return SampleGroup(group.id, group.task, tuple(sample(trajectory) for trajectory in group.done))


def sample(trajectory: Trajectory) -> Sample:
    """The whole conversation as one sequence, so that shared history is trained once, not once a turn."""
    if trajectory.reward is None or not trajectory.outcome.trainable:
        raise ValueError(f"trajectory {trajectory.id} ended as {trajectory.outcome} and cannot be trained")
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in trajectory.turns:
        seen, made = len(turn.prompt), len(turn.tokens)
        tokens += turn.prompt + turn.tokens
        mask += [0] * seen + [1] * made
        logprobs += [0.0] * seen
        logprobs += turn.logprobs
        versions += [-1] * seen
        versions += turn.versions
    truncated = trajectory.outcome is Outcome.TRUNCATED
    return Sample(
        trajectory.id,
        trajectory.task,
        tokens,
        mask,
        logprobs,
        versions,
        trajectory.reward,
        truncated,
        trajectory.temperature,
    )
