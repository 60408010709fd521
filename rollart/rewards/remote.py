"""A reward function that runs elsewhere, alone or in batches.

The invariants:
- Batches are made only once the function has told that it takes several episodes at once, and never larger than both
  sides allow. Episodes go out in the order they came.
- One bad episode harms no other: a batch is tried once, and if it fails each of its episodes is asked for by itself,
  with the retries that are left.
- A caller that goes away takes its request with it, unless others share it.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from functools import partial

from rollart.config import RewardConfig
from rollart.core.types import Episode, RewardResult
from rollart.rewards.calls import Caller, Usage
from rollart.rewards.transports.base import NoAnswer, Refused, Transport
from rollart.rewards.wire import Answer, Request, encode


@dataclass(slots=True, eq=False)
class _Waiting:
    episode: Episode
    usage: Usage
    result: asyncio.Future[RewardResult]


class RemoteReward:
    """One function behind one transport. `deadline` and `retries` are what the reward leaves open."""

    def __init__(self, reward: RewardConfig, transport: Transport, *, deadline: float, retries: int) -> None:
        self._reward = reward
        self._transport = transport
        self._tries = 1 + (retries if reward.retries is None else reward.retries)
        self._caller = Caller(
            transport, concurrency=reward.concurrency, deadline=reward.deadline or deadline, hedge=reward.hedge
        )
        self._batches = asyncio.Semaphore(reward.concurrency)
        self._takes = 1  # episodes in one request, as far as the function has told
        self._waiting: deque[_Waiting] = deque()
        self._open: set[_Waiting] = set()
        self._full = asyncio.Event()
        self._senders: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Requests under way."""
        return self._caller.running

    async def start(self) -> None:
        await self._transport.start()

    async def close(self) -> None:
        for sender in list(self._senders):
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        for waiting in self._open:
            if not waiting.result.done():
                waiting.result.set_exception(Refused("the rewards were closed"))
        await self._transport.close()

    async def score(self, episode: Episode, usage: Usage) -> RewardResult:
        """Raises NoAnswer after the last try."""
        if self._most == 1:
            return await self._alone(episode, usage, self._tries)
        waiting = _Waiting(episode, usage, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if len(self._waiting) == 1:
            self._begin()
        if len(self._waiting) >= self._most:
            self._full.set()
        self._open.add(waiting)
        try:
            return await waiting.result
        except NoAnswer as error:
            if self._tries == 1 or isinstance(error, Refused):
                raise
        finally:
            self._open.discard(waiting)
        return await self._alone(episode, usage, self._tries - 1)

    @property
    def _most(self) -> int:
        return min(self._takes, self._reward.batch)

    async def _alone(self, episode: Episode, usage: Usage, tries: int) -> RewardResult:
        return await self._caller.call(self._body(episode=episode), self._result, tries, usage)

    def _body(self, episode: Episode | None = None, episodes: list[Episode] | None = None) -> bytes:
        request = Request(episode, episodes, self._reward.function, self._reward.version, self._reward.args)
        try:
            return encode(request)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise Refused(f"the episode cannot be sent: {error}") from error

    def _result(self, answer: Answer) -> RewardResult:
        self._takes = max(1, answer.batch)
        return answer.result()

    # Batches

    def _begin(self) -> None:
        sender = asyncio.create_task(self._send())
        self._senders.add(sender)
        sender.add_done_callback(self._senders.discard)

    async def _send(self) -> None:
        """Send what waits, as one request, once it is enough or has waited long enough."""
        self._full.clear()
        try:
            async with asyncio.timeout(self._reward.batch_window):
                await self._full.wait()
        except TimeoutError:
            pass  # as many as there are
        async with self._batches:  # what comes while there is no place goes along
            drawn = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
            if self._waiting:
                self._begin()
            batch = [waiting for waiting in drawn if not waiting.result.done()]
            if batch:
                await self._together(batch)

    async def _together(self, batch: list[_Waiting]) -> None:
        usage = Usage()
        call = asyncio.create_task(self._batch_call([waiting.episode for waiting in batch], usage))

        def gone(_: object) -> None:
            if all(waiting.result.cancelled() for waiting in batch):
                call.cancel()

        for waiting in batch:
            waiting.result.add_done_callback(gone)
        try:
            await asyncio.wait([call])
        finally:
            call.cancel()
        if call.cancelled():
            return  # nobody waits any more
        failure = call.exception()
        results = call.result() if failure is None else [failure] * len(batch)
        for waiting, result in zip(batch, results, strict=True):
            waiting.usage.add(usage, share=len(batch))
            if waiting.result.done():
                continue
            if isinstance(result, RewardResult):
                waiting.result.set_result(result)
            else:
                waiting.result.set_exception(result)

    async def _batch_call(self, episodes: list[Episode], usage: Usage) -> list[RewardResult | NoAnswer]:
        body = self._body(episodes=episodes)
        return await self._caller.call(body, partial(self._results, len(episodes)), 1, usage)

    def _results(self, count: int, answer: Answer) -> list[RewardResult | NoAnswer]:
        """One for each episode of a batch, in order. Raises ValueError for an answer that is not such a list."""
        if answer.error:
            raise ValueError(answer.error)
        if answer.results is None or len(answer.results) != count:
            raise ValueError(f"{count} episodes were sent, but the answer has not as many `results`")
        self._takes = max(1, answer.batch)
        return [_result(each) for each in answer.results]


def _result(answer: Answer) -> RewardResult | NoAnswer:
    try:
        return answer.result()
    except (ValueError, TypeError) as error:
        return NoAnswer(str(error))
