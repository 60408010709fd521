"""A trajectory that another process played: what the control plane decides by, and the rest as bytes."""

from rollart.core.types import Trajectory


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
