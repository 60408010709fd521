"""Settings of the scheduler. The five presets are settings of the same scheduler, so comparisons are fair."""

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

    def within(self, oldest: int | None, version: int) -> bool:
        """Whether tokens as old as `oldest` may be trained on `version`. After a resume from an earlier checkpoint they
        can be newer than the policy: the bound is on age only, and importance weights correct the rest."""
        return oldest is None or not self.enforce or version - oldest <= self.alpha


def preset(name: str, alpha: int, window: float, extra_members: int, extra_groups: int) -> Schedule:
    if name == "sync":
        return Schedule(alpha=0, lockstep=True, score_late=True, one_batch=True, swap_late=True, window=1.0)
    if name == "sync_plus":
        return Schedule(alpha=0, one_batch=True, swap_late=True, window=1.0)
    if name == "one_off":
        return Schedule(alpha=1, one_batch=True, swap_late=True, window=1.0)
    if name == "start_bound":
        return Schedule(alpha=alpha, enforce=False, window=alpha + 1.0)
    if name == "rollart":
        return Schedule(alpha=alpha, window=window, extra_members=extra_members, extra_groups=extra_groups)
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
