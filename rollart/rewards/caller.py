"""Remote calls with a deadline, retries with backoff, hedging, and a concurrency limit.

The invariants:
- At most `concurrency` requests are under way, hedges included; callers are served in order. A hedge is sent only if
  no caller waits, and for at most one call in ten.
- All requests of a call carry the same idempotency key. The first valid response wins and the others are cancelled.
- A busy platform costs no attempt, but makes every caller wait for its Retry-After; a call gives up on a busy platform
  after the deadline times the number of attempts.
- A call returns a valid response or raises with its last reason, within a bounded time once it was admitted.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rollart.rewards.transports.base import CallFailed, CallRefused, PlatformBusy, RewardTransport, TransportReply
from rollart.rewards.wire import RewardResponse, idempotency_key

T = TypeVar("T")
BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
MAX_RETRY_AFTER_S = 60.0
HEDGE_SHARE = 0.1
LATENCIES, MIN_LATENCIES, SLOW_QUANTILE = 200, 20, 0.95  # of the last calls; a slower call is hedged


@dataclass(slots=True)
class CallUsage:
    """What one score has cost so far."""

    tries: int = 0
    hedges: int = 0
    cold: bool = False
    first_byte_s: float = 0.0
    billed_s: float = 0.0

    def add_reply(self, reply: TransportReply) -> None:
        self.cold = self.cold or reply.cold
        self.first_byte_s = reply.first_byte_s
        self.billed_s += reply.billed_s

    def add_share(self, batch: "CallUsage", share: int) -> None:
        """This score's share of the cost of a batch."""
        self.tries += batch.tries
        self.hedges += batch.hedges
        self.cold = self.cold or batch.cold
        self.first_byte_s = batch.first_byte_s
        self.billed_s += batch.billed_s / share


class RemoteCaller:
    """Calls one function through one transport."""

    def __init__(self, transport: RewardTransport, *, concurrency: int, deadline: float, hedge: bool = True) -> None:
        self._transport, self._deadline, self._hedge = transport, deadline, hedge
        self._slots = asyncio.Semaphore(concurrency)
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._not_before = 0.0
        self._attempts = self._hedges = 0
        self.running = 0

    async def call(self, body: bytes, read: Callable[[RewardResponse], T], tries: int, usage: CallUsage) -> T:
        """`read` of the response; it raises ValueError or TypeError for an invalid one. Raises CallFailed."""
        clock = asyncio.get_running_loop().time
        key, failed, busy, give_up = idempotency_key(body), 0, 0, 0.0
        while True:
            try:
                async with self._slots:
                    give_up = give_up or clock() + self._deadline * tries
                    await asyncio.sleep(max(0.0, self._not_before - clock()))
                    return await self._attempt(body, key, read, usage)
            except CallRefused:
                raise
            except PlatformBusy as error:
                busy += 1
                if error.after is not None:
                    self._not_before = max(self._not_before, clock() + min(error.after, MAX_RETRY_AFTER_S))
                if clock() >= give_up:
                    raise
            except CallFailed:
                failed += 1
                if failed == tries:
                    raise
            await asyncio.sleep(min(BACKOFF_S * 2 ** (failed + busy - 1), MAX_BACKOFF_S) * random.uniform(0.5, 1))

    async def _attempt(self, body: bytes, key: str, read: Callable[[RewardResponse], T], usage: CallUsage) -> T:
        usage.tries += 1
        self._attempts += 1
        try:
            async with asyncio.timeout(self._deadline):
                return await self._race(body, key, read, usage)
        except TimeoutError:
            raise CallFailed(f"no response within {self._deadline:g} s") from None

    async def _race(self, body: bytes, key: str, read: Callable[[RewardResponse], T], usage: CallUsage) -> T:
        tasks = {asyncio.create_task(self._send(body, key, read, usage))}
        try:
            done, _ = await asyncio.wait(tasks, timeout=self._hedge_after())
            if not done and not self._slots.locked() and self._hedges < HEDGE_SHARE * self._attempts:
                self._hedges += 1
                usage.hedges += 1
                tasks.add(asyncio.create_task(self._hedged(body, key, read, usage)))
            failure: BaseException | None = None
            while tasks:
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    failure = task.exception()
                    if failure is None:
                        return task.result()
            assert failure is not None
            raise failure
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _hedge_after(self) -> float | None:
        """Seconds after which a request is slow; None if not known yet."""
        if not self._hedge or len(self._latencies) < MIN_LATENCIES:
            return None
        return sorted(self._latencies)[int(SLOW_QUANTILE * len(self._latencies))]

    async def _hedged(self, body: bytes, key: str, read: Callable[[RewardResponse], T], usage: CallUsage) -> T:
        async with self._slots:
            return await self._send(body, key, read, usage)

    async def _send(self, body: bytes, key: str, read: Callable[[RewardResponse], T], usage: CallUsage) -> T:
        clock = asyncio.get_running_loop().time
        began = clock()
        self.running += 1
        try:
            reply = await self._transport.send(body, key, self._deadline)
        finally:
            self.running -= 1
        usage.add_reply(reply)
        if reply.response.bug:
            raise CallRefused(reply.response.error)
        try:
            value = read(reply.response)
        except (ValueError, TypeError) as error:
            raise CallFailed(str(error)) from error
        self._latencies.append(clock() - began)
        return value
