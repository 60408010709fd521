"""Assigns claims to the hosts of a pool, in the order they were requested.

The invariants: a claim goes to the available host with most free processes, to a running one if there is any; nobody
waits while a host has one free, and there are at most `limit` claims, even if a host has more than its share because a
claim moved there; once closed, every request fails with the same error.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from rollart.core.errors import RollartError
from rollart.workers.pool_host import PoolHost


class ClaimQueue:
    def __init__(self, limit: int, warm: int = 0) -> None:
        self._limit = limit
        self._warm = warm
        self._waiting: deque[asyncio.Future[PoolHost]] = deque()
        self.hosts: list[PoolHost] = []
        self.error: RollartError | None = None  # once closed

    def add(self, host: PoolHost) -> None:
        self.hosts.append(host)
        self._set_shares()

    def remove(self, host: PoolHost) -> None:
        """Its share goes to the others."""
        self.hosts.remove(host)
        self._set_shares()

    def set_away(self, host: PoolHost, away: bool) -> None:
        """While a host is away, the others have its share."""
        host.away = away
        self._set_shares()

    def _set_shares(self) -> None:
        here = [host for host in self.hosts if not host.away] or self.hosts
        weights = [host.location.request.count if host in here else 0.0 for host in self.hosts]
        shares, warm = split(self._limit, weights), split(self._warm, weights)
        for host, share, count in zip(self.hosts, shares, warm, strict=True):
            host.warm.count = count
            host.resize(share)
        self.dispatch()

    def best_host(self, exclude: PoolHost | None = None) -> PoolHost | None:
        free = [host for host in self.hosts if host.free > 0 and host is not exclude]
        return max(free, key=lambda host: (host.running, host.free), default=None)

    def spare_host(self, avoid: PoolHost | None) -> PoolHost | None:
        """An available host for a claim that does not count; another than `avoid` if there is one."""
        hosts = [host for host in self.hosts if host.available]
        return max(hosts, key=lambda host: (host is not avoid, host.running, host.free), default=None)

    async def acquire(self, first: bool = False) -> PoolHost:
        """Wait for a claim, `first` ahead of all that wait already. Raises the error of `close`."""
        if self.error is not None:
            raise self.error
        waiting: asyncio.Future[PoolHost] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if first else self._waiting.append)(waiting)
        self.dispatch()
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.release(waiting.result())  # assigned in the same moment
            raise

    def move(self, host: PoolHost, other: PoolHost) -> None:
        other.claims += 1
        self.release(host)

    def release(self, host: PoolHost) -> None:
        host.claims -= 1
        self.dispatch()

    def dispatch(self) -> None:
        """Assign what is free to those that wait."""
        while self._waiting:
            if self._waiting[0].done():  # cancelled
                self._waiting.popleft()
                continue
            host = self.best_host()
            if host is None or sum(host.claims for host in self.hosts) >= self._limit:
                return
            host.claims += 1
            self._waiting.popleft().set_result(host)

    def close(self, error: RollartError) -> None:
        self.error = error
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(error)


def split(total: int, weights: Sequence[float]) -> list[int]:
    """Whole shares in proportion to the weights."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda index: shares[index] - exact[index])
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares
