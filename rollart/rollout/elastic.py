"""How large a batch must be so that training it takes as long as making the next one: a state machine without a clock.

Data for batch `n + alpha + 1` may only be made once version `n + 1` serves, so the transfer of the weights and the
longest trajectories must fit into `alpha` training steps. Where they do not, the trainer waits at every step, however
many engines there are. Training more groups per step fills the wait: every group is still trained within the bound,
none is dropped because it is long, and the mixture of a larger batch is as exact. Sizes change only for batches that
have no group yet, so a batch that is being made has its size for good.
"""

from math import ceil

TOLERATED = 0.03  # wait before a batch, as a share of the training before it
SHRINK = 0.98  # at a batch without a longer wait: what made the trainer wait may be over


class BatchSizer:
    """`size` is that of the batches to be opened: `groups`, or up to `factor` times as many."""

    def __init__(self, groups: int, factor: float, alpha: int) -> None:
        self.size = groups
        self._groups, self._max = groups, int(groups * factor)
        self._gain = (alpha + 1) / max(1, alpha)
        self._last: tuple[int, float] | None = None

    def taken(self, groups: int, now: float, waited: float) -> None:
        """A batch of `groups` was taken, after the trainer had `waited` seconds for it."""
        if self._last is not None:
            trained, since = self._last
            self._adapt(trained, now - waited - since, waited)
        self._last = groups, now

    def _adapt(self, trained: int, busy: float, waited: float) -> None:
        """The trainer was busy with `trained` groups, then it waited. A wait of `w` at every step means that `alpha`
        steps are `(alpha + 1) * w` too short: each must take a share of that longer."""
        if busy <= 0.0 or waited <= TOLERATED * busy:
            self.restore(int(self.size * SHRINK))
        else:
            self.restore(max(self.size, ceil(trained * (1.0 + self._gain * waited / busy))))

    def restore(self, size: int) -> None:
        """Batches of `size`, or the nearest that is allowed."""
        self.size = min(self._max, max(self._groups, size))
