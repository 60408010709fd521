"""A group: the trajectories that share a start, as a small state machine without time or tasks."""

from dataclasses import dataclass, field

from rollart.core.types import Trajectory


@dataclass(slots=True)
class Group:
    """`running` are members under way, `done` the trainable ones; `failures` counts members that failed by no fault of
    the policy. A group is ready when `size` members are done, and given up once more than `retries` have failed. A
    `probe` is to find out whether a task that is left out works again: it is played to its end, however old it gets."""

    id: str
    task: str
    index: int
    seed: int
    size: int
    version: int
    launched: int = 0
    running: set[int] = field(default_factory=set)
    done: list[Trajectory] = field(default_factory=list)
    failures: int = 0
    oldest: int | None = None
    started_s: float = 0.0
    closed: bool = False
    probe: bool = False

    @property
    def ready(self) -> bool:
        return len(self.done) >= self.size

    def missing(self, extra: int) -> int:
        """How many members to launch now: replacements for failed ones included."""
        if self.ready or self.closed:
            return 0
        return max(0, self.size + extra - len(self.done) - len(self.running))

    def launch(self) -> int:
        member = self.launched
        self.launched += 1
        self.running.add(member)
        return member

    def saw(self, version: int) -> None:
        """A token of `version` belongs to this group now."""
        if self.oldest is None or version < self.oldest:
            self.oldest = version
