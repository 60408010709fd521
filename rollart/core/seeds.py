"""Seeds from names: a run has the same episodes and random numbers, whatever the order of events."""

from hashlib import blake2b


def seed_of(*parts: object) -> int:
    """A stable 31-bit number."""
    digest = blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
