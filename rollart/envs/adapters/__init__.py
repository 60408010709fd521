"""Environments of other packages, as ours: one thin file each.

They run in the Python of the package's own family: from 3.9 on, with the standard library and that package only.
"""

from __future__ import annotations


def instance(seed: int, held_out: bool) -> int:
    """The seed for a package that knows nothing of held-out instances: even numbers train, odd ones evaluate."""
    return 2 * seed + held_out
