"""A group: the trajectories of one episode, as a small state machine without time or coroutines."""

from dataclasses import dataclass, field

from rollart.core.types import SampleGroup, Trajectory
from rollart.rollout.ledger import GroupRecord


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    """What is trained of a group: its samples, and its members in their order, each with a checksum of them."""

    samples: SampleGroup
    members: dict[int, int]


@dataclass(slots=True)
class Group:
    """`running` are members under way, `done` the trainable trajectories; `failures` counts members that failed through
    no fault of the policy. A group is ready when `size` members are done; `prepared` is what a batch then takes of it.
    A `probe` finds out whether a quarantined task works again: it runs to its end, however old it gets."""

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
    prepared: PreparedGroup | None = None

    @classmethod
    def of(cls, record: GroupRecord, started_s: float, probe: bool = False) -> "Group":
        return cls(
            id=record.id,
            task=record.task,
            index=record.index,
            seed=record.seed,
            size=record.size,
            version=record.version,
            started_s=started_s,
            probe=probe,
        )

    @property
    def ready(self) -> bool:
        return len(self.done) >= self.size

    def missing(self, extra: int) -> int:
        """Members to launch now, replacements of failed ones included."""
        if self.ready or self.closed:
            return 0
        return max(0, self.size + extra - len(self.done) - len(self.running))

    def launch(self) -> int:
        member = self.launched
        self.launched += 1
        self.running.add(member)
        return member

    def record_version(self, version: int) -> None:
        """The group has a token of `version`."""
        if self.oldest is None or version < self.oldest:
            self.oldest = version
