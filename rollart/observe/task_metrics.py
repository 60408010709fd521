"""What one task did, trajectory by trajectory."""

from collections import Counter

from rollart.core import events as ev
from rollart.observe.aggregates import MovingMean
from rollart.observe.snapshot import AGENT, STAGES, EndedTrajectory, HeldOutPoint, TaskSnapshot


class TaskMetrics:
    def __init__(self, name: str) -> None:
        self.name = name
        self.held_out: list[HeldOutPoint] = []
        self.out = ""
        self.reward, self.success = MovingMean(), MovingMean()
        self.turns, self.tokens, self.seconds = MovingMean(), MovingMean(), MovingMean()
        self.outcomes: Counter[str] = Counter()
        self.stages = dict.fromkeys(STAGES, 0.0)
        self.since_step: list[float] = []
        self.agent: Counter[str] = Counter()

    def agent_played(self, event: ev.AgentPlayed) -> None:
        for name in AGENT:
            self.agent[name] += getattr(event, name)

    def ended(self, event: ev.TrajectoryEnded, stages: dict[str, float]) -> EndedTrajectory:
        ended = EndedTrajectory(
            id=event.trajectory,
            task=event.task,
            outcome=event.outcome.value,
            turns=event.turns,
            tokens=event.tokens,
            reward=event.reward,
            success=event.success,
            seconds=event.seconds,
            stages=stages,
        )
        self.outcomes[event.outcome.value] += 1
        for stage, seconds in stages.items():
            self.stages[stage] += seconds
        if event.outcome.trainable:
            self.turns.add(event.turns)
            self.tokens.add(event.tokens)
            self.seconds.add(event.seconds)
            if event.reward is not None:
                self.reward.add(event.reward)
                self.since_step.append(event.reward)
            if event.success is not None:
                self.success.add(event.success)
        return ended

    def snapshot(self) -> TaskSnapshot:
        return TaskSnapshot(
            name=self.name,
            held_out=tuple(self.held_out),
            reward=self.reward.mean,
            success=self.success.mean,
            turns=self.turns.mean,
            tokens=self.tokens.mean,
            seconds=self.seconds.mean,
            outcomes=dict(self.outcomes),
            stages=dict(self.stages),
            agent=dict(self.agent),
            out=self.out,
        )
