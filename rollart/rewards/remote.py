"""A remote reward function, called with single episodes or batches.

The invariants:
- Batches are sent only after a response said that the function takes several episodes, and never larger than both
  sides allow. Episodes are sent in order.
- A bad episode affects no other: a batch is tried once, and if it fails each of its episodes is sent by itself, with
  the retries that are left.
- Cancelling a caller cancels its request, unless others share it.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from functools import partial

import msgspec

from rollart.config import RewardConfig
from rollart.core.types import Episode, RewardResult
from rollart.rewards.caller import CallUsage, RemoteCaller
from rollart.rewards.transports.base import CallFailed, CallRefused, RewardTransport
from rollart.rewards.wire import RewardRequest, RewardResponse


@dataclass(slots=True, eq=False)
class _Waiting:
    episode: Episode
    usage: CallUsage
    result: asyncio.Future[RewardResult]


class RemoteReward:
    """One function behind one transport. `deadline` and `retries` are the defaults."""

    def __init__(self, reward: RewardConfig, transport: RewardTransport, *, deadline: float, retries: int) -> None:
        self._reward, self._transport = reward, transport
        self._tries = 1 + (retries if reward.retries is None else reward.retries)
        self._caller = RemoteCaller(
            transport, concurrency=reward.concurrency, deadline=reward.deadline or deadline, hedge=reward.hedge
        )
        self._batches = asyncio.Semaphore(reward.concurrency)
        self._accepts = 1  # episodes per request, as the function last reported
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
                waiting.result.set_exception(CallRefused("the rewards were closed"))
        await self._transport.close()

    async def score(self, episode: Episode, usage: CallUsage) -> RewardResult:
        """Raises CallFailed after the last attempt."""
        if self._batch_size == 1:
            return await self._single(episode, usage, self._tries)
        waiting = _Waiting(episode, usage, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if len(self._waiting) == 1:
            self._start_sender()
        if len(self._waiting) >= self._batch_size:
            self._full.set()
        self._open.add(waiting)
        try:
            return await waiting.result
        except CallFailed as error:
            if self._tries == 1 or isinstance(error, CallRefused):
                raise
        finally:
            self._open.discard(waiting)
        return await self._single(episode, usage, self._tries - 1)

    @property
    def _batch_size(self) -> int:
        return min(self._accepts, self._reward.batch)

    async def _single(self, episode: Episode, usage: CallUsage, tries: int) -> RewardResult:
        return await self._caller.call(self._body(episode=episode), self._result, tries, usage)

    def _body(self, episode: Episode | None = None, episodes: list[Episode] | None = None) -> bytes:
        request = RewardRequest(episode, episodes, self._reward.function, self._reward.version, self._reward.args)
        try:
            return msgspec.json.encode(request)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CallRefused(f"the episode cannot be sent: {error}") from error

    def _result(self, response: RewardResponse) -> RewardResult:
        self._accepts = max(1, response.batch)
        return response.result()

    # Batches

    def _start_sender(self) -> None:
        sender = asyncio.create_task(self._send())
        self._senders.add(sender)
        sender.add_done_callback(self._senders.discard)

    async def _send(self) -> None:
        """Send what waits as one request, when the batch is full or the window is over."""
        self._full.clear()
        try:
            async with asyncio.timeout(self._reward.batch_window):
                await self._full.wait()
        except TimeoutError:
            pass  # the batch is not full
        async with self._batches:  # episodes that arrive while this waits join the batch
            taken = [self._waiting.popleft() for _ in range(min(self._batch_size, len(self._waiting)))]
            if self._waiting:
                self._start_sender()
            batch = [waiting for waiting in taken if not waiting.result.done()]
            if batch:
                await self._send_batch(batch)

    async def _send_batch(self, batch: list[_Waiting]) -> None:
        usage = CallUsage()
        call = asyncio.create_task(self._batch_call([waiting.episode for waiting in batch], usage))

        def on_done(_: object) -> None:
            if all(waiting.result.cancelled() for waiting in batch):
                call.cancel()

        for waiting in batch:
            waiting.result.add_done_callback(on_done)
        try:
            await asyncio.wait([call])
        finally:
            call.cancel()
        if call.cancelled():
            return  # all callers were cancelled
        failure = call.exception()
        results = call.result() if failure is None else [failure] * len(batch)
        for waiting, result in zip(batch, results, strict=True):
            waiting.usage.add_share(usage, share=len(batch))
            if waiting.result.done():
                continue
            if isinstance(result, RewardResult):
                waiting.result.set_result(result)
            else:
                waiting.result.set_exception(result)

    async def _batch_call(self, episodes: list[Episode], usage: CallUsage) -> list[RewardResult | CallFailed]:
        body = self._body(episodes=episodes)
        return await self._caller.call(body, partial(self._results, len(episodes)), 1, usage)

    def _results(self, count: int, response: RewardResponse) -> list[RewardResult | CallFailed]:
        """One per episode of a batch, in order. Raises ValueError if the response is not such a list."""
        if response.error:
            raise ValueError(response.error)
        if response.results is None or len(response.results) != count:
            raise ValueError(f"{count} episodes were sent, but the response has not as many `results`")
        self._accepts = max(1, response.batch)
        return [_result(each) for each in response.results]


def _result(response: RewardResponse) -> RewardResult | CallFailed:
    try:
        return response.result()
    except (ValueError, TypeError) as error:
        return CallFailed(str(error))
