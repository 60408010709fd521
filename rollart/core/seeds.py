"""Seeds from names: the same run asks for the same episodes and the same random numbers, in whatever order."""

from hashlib import blake2b


def seed_of(*parts: object) -> int:
    """A stable 31-bit number."""
    digest = blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
