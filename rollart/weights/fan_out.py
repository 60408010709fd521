"""The tree in which replicas relay buckets, so that a publisher serves each bucket only a few times.

Replicas join in the order in which they come: the first `fan_out` fetch from the publisher, each of them serves the
next `fan_out`, and so on. A replica that loses its parent goes to the grandparent, and at last to the publisher.
"""

from collections.abc import Sequence

FAN_OUT = 2


def ancestors(position: int, fan_out: int = FAN_OUT) -> list[int]:
    """Ancestors of replica number `position`, nearest first, without the publisher.

    >>> ancestors(1), ancestors(2), ancestors(7)
    ([], [0], [2, 0])
    """
    above = []
    while position >= fan_out:
        position = position // fan_out - 1
        above.append(position)
    return above


class FanOut:
    """Of one shard of one publication. Replicas that cannot serve, and so have no URL, are leaves."""

    def __init__(self, fan_out: int = FAN_OUT) -> None:
        self._relays: list[str] = []
        self._fan_out = fan_out

    def join(self, relay: str) -> Sequence[str]:
        """The URLs to fetch buckets from, in this order, before the publisher's own."""
        if relay and relay in self._relays:  # it restarted
            position = self._relays.index(relay)
        else:
            position = len(self._relays)
            if relay:
                self._relays.append(relay)
        return [self._relays[index] for index in ancestors(position, self._fan_out)]
