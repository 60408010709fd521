"""A modelled engine whose forward passes take as long as the roofline of its device says.

It batches as the embedded engine does: every pass gives each decoding sequence a token and prefills a chunk of the
sequences that are not there yet, first come first served. KV stays with its session; a session's later turns prefill
only what is new.
"""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass

from rollart.resources.roofline import Roofline, Work, decode, prefill
from rollart.types import Completion, EngineStatus, GenerationRequest


@dataclass(slots=True, eq=False)
class _Sequence:
    request: GenerationRequest
    answer: asyncio.Future[None]
    length: int
    computed: int
    cached: int
    began: float
    admitted: float = 0.0
    first: float = 0.0
    made: int = 0


class RooflineEngine:
    """Answers have `max_tokens` tokens: how long they are is the caller's to say."""

    def __init__(self, roofline: Roofline, *, max_batch: int = 64, chunk: int = 512, kept: int = 4096) -> None:
        self.version = 0
        self.busy_s = 0.0
        self._roofline, self._max_batch, self._chunk, self._kept = roofline, max_batch, chunk, kept
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._stepping: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest) -> Completion:
        loop = asyncio.get_running_loop()
        cached = min(self._sessions.pop(request.session, 0), len(request.tokens) - 1)
        sequence = _Sequence(request, loop.create_future(), len(request.tokens), cached, cached, loop.time())
        self._waiting.append(sequence)
        if self._stepping is None or self._stepping.done():
            self._stepping = loop.create_task(self._steps())
        try:
            await sequence.answer
        finally:
            for place in (self._waiting, self._running):
                if sequence in place:
                    place.remove(sequence)
        made = sequence.made
        return Completion(
            [1] * made,
            [-1.0] * made,
            [self.version] * made,
            "length",
            prompt=sequence.length,
            cached=sequence.cached,
            queue_s=sequence.admitted - sequence.began,
            prefill_s=sequence.first - sequence.admitted,
            decode_s=loop.time() - sequence.first,
        )

    async def _steps(self) -> None:
        while self._waiting or self._running:
            clock = asyncio.get_running_loop().time
            while self._waiting and len(self._running) < self._max_batch:
                sequence = self._waiting.popleft()
                sequence.admitted = clock()
                self._running.append(sequence)
            seconds, ready = self._step()
            self.busy_s += seconds
            await asyncio.sleep(seconds)
            for sequence in ready:
                sequence.first = sequence.first or clock()
                sequence.made += 1
                sequence.computed = sequence.length + sequence.made - 1
                if sequence.made >= sequence.request.sampling.max_tokens and sequence in self._running:
                    self._end(sequence)

    def _step(self) -> tuple[float, list[_Sequence]]:
        """How long the next pass takes, and the sequences that get a token from it."""
        decoding = [one for one in self._running if one.made]
        work = decode(len(decoding), sum(one.computed for one in decoding)) if decoding else Work(0, 0, 0)
        ready, left = list(decoding), self._chunk
        for one in self._running:
            if one.made or left <= 0:
                continue
            count = min(left, one.length - one.computed)
            work += prefill(count, one.computed)
            one.computed += count
            left -= count
            if one.computed == one.length:
                ready.append(one)
        return self._roofline.seconds(work), ready

    def _end(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self._sessions[sequence.request.session] = sequence.computed
        if len(self._sessions) > self._kept:
            self._sessions.popitem(last=False)
        if not sequence.answer.done():
            sequence.answer.set_result(None)

    async def prefill(self, request: GenerationRequest) -> int:
        return 0

    async def abort(self, request_id: str) -> None:
        """A cancelled `generate` is enough."""

    async def load(self, version: int) -> None:
        self.version = version
        self._sessions.clear()

    async def status(self) -> EngineStatus:
        return EngineStatus(self.version, len(self._running), len(self._waiting), 0, 0, 0, 0, 0, self.busy_s)
