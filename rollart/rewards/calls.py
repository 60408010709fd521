"""Calls to a function that runs elsewhere: deadline, retries, a second request for a slow one, and a cap.

The invariants:
- At most `concurrency` requests are under way, second ones included; callers get their turn in the order they came. A
  second request is only sent if nobody waits for a place, and only for one call in ten.
- All requests of a call carry the same idempotency key. The first good answer wins and the others are cancelled.
- A platform that says it is busy costs no try, but makes every caller wait as long as it asked for; a call gives up on
  a busy platform after the time that all of its tries together may take.
- A call ends with a good answer or raises with its last reason, within a bounded time once it has its first place.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rollart.rewards.transports.base import Busy, NoAnswer, Refused, Reply, Transport
from rollart.rewards.wire import Answer, idempotency_key

T = TypeVar("T")
BACK_OFF_S, LONGEST_BACK_OFF_S = 0.1, 5.0
LONGEST_PAUSE_S = 60.0
HEDGED_SHARE, SEEN, ENOUGH, SLOW = 0.1, 200, 20, 0.95


@dataclass(slots=True)
class Usage:
    """What one score has cost so far."""

    tries: int = 0
    hedges: int = 0
    cold: bool = False
    first_byte_s: float = 0.0
    billed_s: float = 0.0

    def replied(self, reply: Reply) -> None:
        self.cold = self.cold or reply.cold
        self.first_byte_s = reply.first_byte_s
        self.billed_s += reply.billed_s

    def add(self, batch: "Usage", share: int) -> None:
        """Its share of what a batch has cost."""
        self.tries += batch.tries
        self.hedges += batch.hedges
        self.cold = self.cold or batch.cold
        self.first_byte_s = batch.first_byte_s
        self.billed_s += batch.billed_s / share


class Caller:
    """Makes the calls of one function through one transport."""

    def __init__(self, transport: Transport, *, concurrency: int, deadline: float, hedge: bool = True) -> None:
        self._transport = transport
        self._deadline = deadline
        self._hedge = hedge
        self._places = asyncio.Semaphore(concurrency)
        self._seconds: deque[float] = deque(maxlen=SEEN)
        self._not_before = 0.0
        self._attempts = self._hedges = 0
        self.running = 0

    async def call(self, body: bytes, read: Callable[[Answer], T], tries: int, usage: Usage) -> T:
        """What `read` makes of the answer; `read` raises ValueError or TypeError for a bad one. Raises NoAnswer."""
        clock = asyncio.get_running_loop().time
        key, failed, busy, give_up = idempotency_key(body), 0, 0, 0.0
        while True:
            try:
                async with self._places:
                    give_up = give_up or clock() + self._deadline * tries
                    await asyncio.sleep(max(0.0, self._not_before - clock()))
                    return await self._attempt(body, key, read, usage)
            except Refused:
                raise
            except Busy as error:
                busy += 1
                if error.after is not None:
                    self._not_before = max(self._not_before, clock() + min(error.after, LONGEST_PAUSE_S))
                if clock() >= give_up:
                    raise
            except NoAnswer:
                failed += 1
                if failed == tries:
                    raise
            await asyncio.sleep(min(BACK_OFF_S * 2 ** (failed + busy - 1), LONGEST_BACK_OFF_S) * random.uniform(0.5, 1))

    async def _attempt(self, body: bytes, key: str, read: Callable[[Answer], T], usage: Usage) -> T:
        usage.tries += 1
        self._attempts += 1
        try:
            async with asyncio.timeout(self._deadline):
                return await self._race(body, key, read, usage)
        except TimeoutError:
            raise NoAnswer(f"no answer within {self._deadline:g} s") from None

    async def _race(self, body: bytes, key: str, read: Callable[[Answer], T], usage: Usage) -> T:
        tasks = {asyncio.create_task(self._once(body, key, read, usage))}
        try:
            done, _ = await asyncio.wait(tasks, timeout=self._slow())
            if not done and self._may_hedge():
                self._hedges += 1
                usage.hedges += 1
                tasks.add(asyncio.create_task(self._again(body, key, read, usage)))
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

    def _slow(self) -> float | None:
        """Seconds after which a request is slow, as far as is known."""
        if not self._hedge or len(self._seconds) < ENOUGH:
            return None
        return sorted(self._seconds)[int(SLOW * len(self._seconds))]

    def _may_hedge(self) -> bool:
        return not self._places.locked() and self._hedges < HEDGED_SHARE * self._attempts

    async def _again(self, body: bytes, key: str, read: Callable[[Answer], T], usage: Usage) -> T:
        async with self._places:
            return await self._once(body, key, read, usage)

    async def _once(self, body: bytes, key: str, read: Callable[[Answer], T], usage: Usage) -> T:
        clock = asyncio.get_running_loop().time
        began = clock()
        self.running += 1
        try:
            reply = await self._transport.send(body, key, self._deadline)
        finally:
            self.running -= 1
        usage.replied(reply)
        try:
            value = read(reply.answer)
        except (ValueError, TypeError) as error:
            raise NoAnswer(str(error)) from error
        self._seconds.append(clock() - began)
        return value
