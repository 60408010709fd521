"""Seeds from names: a run has the same episodes and random numbers, whatever the order of events."""

from hashlib import blake2b


def seed_of(*parts: object) -> int:
    """A stable 31-bit number."""
    digest = blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def numbered_seed(seed: int, number: int) -> int:
    """The seed of episode `number` of a task whose episodes are numbered, not drawn; `seed` is that of the run."""
    return (seed & 0x7FFFFFFF) << 32 | number


def episode_number(seed: int) -> tuple[int, int]:
    """What `numbered_seed` was made from.

    >>> episode_number(numbered_seed(3, 17))
    (3, 17)
    """
    return seed >> 32, seed & 0xFFFFFFFF
