"""Who gets buckets from whom, so that a publisher is asked for each of them a few times, however many want it.

Those who fetch a version form a tree in the order in which they come: the first `fan_out` take from the publisher, each
of them gives to the next `fan_out`, and so on. Who loses its parent goes to the parent's, and at last to the publisher.
"""

from collections.abc import Sequence

FAN_OUT = 2


def ancestors(position: int, fan_out: int = FAN_OUT) -> list[int]:
    """Those above the one who came as number `position`, nearest first; the publisher above them all is not named.

    >>> ancestors(1), ancestors(2), ancestors(7)
    ([], [0], [2, 0])
    """
    above = []
    while position >= fan_out:
        position = position // fan_out - 1
        above.append(position)
    return above


class FanOut:
    """Of one shard of one publication. Those who cannot serve others, and so have no URL, are leaves."""

    def __init__(self, fan_out: int = FAN_OUT) -> None:
        self._relays: list[str] = []
        self._fan_out = fan_out

    def join(self, relay: str) -> Sequence[str]:
        """The URLs to take buckets from, in this order, before the publisher's own."""
        if relay and relay in self._relays:  # it begins again
            position = self._relays.index(relay)
        else:
            position = len(self._relays)
            if relay:
                self._relays.append(relay)
        return [self._relays[index] for index in ancestors(position, self._fan_out)]
