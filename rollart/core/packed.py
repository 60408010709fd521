"""A trajectory that another process played: what the control plane decides by, and the rest as bytes.

Only the functions of this module ask which of the two forms a trajectory has.
"""

from collections.abc import Callable, Sequence

from msgspec import Raw

from rollart.core.types import Sample, Trajectory


class PackedTrajectory(Trajectory, frozen=True):
    """Its turns are in `body`, compressed as the ledger stores them, and in `samples`, each encoded as the trainer gets
    it; neither is decoded on the way. `checksum` is that of the samples (`rollout.samples`), the other fields are what
    the turns would say."""

    body: bytes = b""
    samples: tuple[bytes, ...] = ()
    checksum: int = 0
    turn_count: int = 0
    oldest_version: int | None = None
    sampled_tokens: int = 0
    all_tokens: int = 0

    @property
    def oldest(self) -> int | None:
        return self.oldest_version

    @property
    def action_tokens(self) -> int:
        return self.sampled_tokens

    @property
    def total_tokens(self) -> int:
        return self.all_tokens


def turn_count(trajectory: Trajectory) -> int:
    return trajectory.turn_count if isinstance(trajectory, PackedTrajectory) else len(trajectory.turns)


def stored(trajectory: Trajectory, encode: Callable[[Trajectory], bytes]) -> bytes:
    """What a ledger that encodes so keeps of it."""
    return trajectory.body if isinstance(trajectory, PackedTrajectory) else encode(trajectory)


def trained(trajectory: Trajectory, make: Callable[[Trajectory], Sequence[Sample]]) -> Sequence[Sample | Raw]:
    """Its samples, as a message to the trainer takes them: encoded already, or made."""
    if isinstance(trajectory, PackedTrajectory):
        return [Raw(sample) for sample in trajectory.samples]
    return make(trajectory)


def encoded_checksum(trajectory: Trajectory) -> int:
    """Of the samples that are encoded already; 0 if none is."""
    return trajectory.checksum if isinstance(trajectory, PackedTrajectory) else 0
