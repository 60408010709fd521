"""Settings of the scheduler. The five presets are settings of the same scheduler, so comparisons are fair. What a task
may have of its own: how its weight changes with the step and with its success, and which of its groups are trained.
"""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """`alpha` is the staleness bound in versions; each flag restricts the full `rollart` schedule."""

    alpha: int = 1
    lockstep: bool = False  # all trajectories of a task generate together, then step together, turn by turn
    score_late: bool = False  # rewards wait until every trajectory of the batch has ended
    one_batch: bool = False  # a batch starts as a whole, when the one before it is complete
    swap_late: bool = False  # engines take new weights only when no trajectory runs
    enforce: bool = True  # the bound holds in flight and at consumption too, not only at admission
    window: float = 2.0  # batches of groups that compete for the next batch, in start order
    extra_members: int = 0
    extra_groups: int = 0
    elastic: float = 1.0  # batches grow up to this many times their size while the trainer waits for them

    def within(self, oldest: int | None, version: int) -> bool:
        """Whether tokens as old as `oldest` may be trained on `version`. After a resume from an earlier checkpoint they
        can be newer than the policy: the bound is on age only, and importance weights correct the rest."""
        return oldest is None or not self.enforce or version - oldest <= self.alpha


def preset(
    name: str, alpha: int, window: float, extra_members: int, extra_groups: int, *, elastic: float = 1.0
) -> Schedule:
    """Raises ValueError if there is no such preset, or batches cannot grow."""
    if name == "sync":
        return Schedule(alpha=0, lockstep=True, score_late=True, one_batch=True, swap_late=True, window=1.0)
    if name == "sync_plus":
        return Schedule(alpha=0, one_batch=True, swap_late=True, window=1.0)
    if name == "one_off":
        return Schedule(alpha=1, one_batch=True, swap_late=True, window=1.0)
    if name == "start_bound":
        return Schedule(alpha=alpha, enforce=False, window=alpha + 1.0)
    if name == "rollart":
        if elastic > 1 and alpha == 0:
            raise ValueError("with alpha 0 the trainer waits for every batch, however large; set alpha to 1")
        return Schedule(
            alpha=alpha, window=window, extra_members=extra_members, extra_groups=extra_groups, elastic=elastic
        )
    raise ValueError(f"there is no preset {name!r}")


@dataclass(frozen=True, slots=True)
class QuarantineRule:
    """A task is quarantined when `rate` of its last `window` trajectories failed, of at least `min_count`, or when
    `groups` in a row were dropped. The first probe comes after `wait` seconds."""

    rate: float = 0.5
    window: int = 50
    min_count: int = 20
    groups: int = 10
    wait: float = 30.0


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The factor of a task's weight at a step: `points` of (step, factor), in order. Between two of them it is that of
    the first, or with `linear` on the line; before the first and after the last it is theirs.

    >>> [WeightPlan(((10, 1.0), (20, 0.0)), linear=True).at(step) for step in (0, 10, 15, 20, 99)]
    [1.0, 1.0, 0.5, 0.0, 0.0]
    """

    points: tuple[tuple[int, float], ...]
    linear: bool = False

    def at(self, step: int) -> float:
        after = bisect_right([point for point, _ in self.points], step)
        before, factor = self.points[max(0, after - 1)]
        if not self.linear or after in (0, len(self.points)):
            return factor
        end, goal = self.points[after]
        return factor + (goal - factor) * (step - before) / (end - before)


@dataclass(frozen=True, slots=True)
class SuccessBand:
    """A task whose success in its last `window` trajectories is not between `low` and `high` has `outside` of its
    weight."""

    low: float
    high: float
    outside: float
    window: int


@dataclass(frozen=True, slots=True)
class GroupRule:
    """Which groups of a task are trained. `spread`: none whose rewards are all the same. `low` and `high`: the group's
    share of successes must be between them. Groups are replaced, at most `tries` in a row. `keep`: of all that pass,
    this share is trained, those with the most spread."""

    spread: bool = False
    low: float = 0.0
    high: float = 1.0
    tries: int = 8
    keep: float = 1.0
