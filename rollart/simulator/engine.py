"""A simulated engine: continuous batching in closed form, from one event to the next.

Invariants
- Time is cut into phases. In a phase the engine prefills a chunk while other sequences decode, stands still for new
  weights, or recomputes KV under them; between phases it only decodes. State changes at arrivals while it only decodes,
  at ends of phases and of sequences, and never in between.
- When the KV of decoding, prefilled and cached sequences does not fit, cached KV is evicted first, the least recently
  used; then the sequence that joined last is preempted.
- KV of a finished turn is cached under its session, for the session's next turn. Members of a group that meet on an
  engine prefill their common prompt once.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rollart.core.types import Completion, EngineStatus, Finish, GenerationRequest, LoadResult, Publication
from rollart.simulator.decoding import CLOSE, DecodingBatch, SimulatedSequence
from rollart.simulator.pass_cost import PassCost, seconds_of, steps_in
from rollart.simulator.prefix_cache import SimulatedPrefixCache
from rollart.simulator.weight_transfer import WeightTransfer

_SPARE = 0.01  # of the KV stays free when a sequence is admitted, so that the others can grow


@dataclass(slots=True)
class EngineSeconds:
    """Seconds of an engine by what it did; the rest of the time it was idle."""

    prefill: float = 0.0
    decode: float = 0.0
    weights: float = 0.0

    @property
    def busy(self) -> float:
        return self.prefill + self.decode


class SimulatedEngine:
    """`response` gives the number of tokens that a request generates and how it finishes, `context` how many of its
    tokens it has. Other engines fetch KV from `url`."""

    def __init__(
        self,
        url: str,
        cost: PassCost,
        weights: WeightTransfer,
        response: Callable[[GenerationRequest], tuple[int, Finish]],
        *,
        context: Callable[[GenerationRequest], int] = lambda request: len(request.tokens),
        max_batch: int,
        chunk: int,
        kv_tokens: int,
        keeps_kv: bool = False,
    ) -> None:
        self.url, self.version, self.times = url, 0, EngineSeconds()
        self.prefilled = self.generated = self.preempted = self.swaps = 0
        self._cost, self._weights, self._response, self._context = cost, weights, response, context
        self._max_batch, self._chunk, self._kv_tokens, self._keeps_kv = max_batch, chunk, kv_tokens, keeps_kv
        self._loop = asyncio.get_running_loop()
        self._clock: Callable[[], float] = self._loop.time
        self._waiting: deque[SimulatedSequence] = deque()
        self._batch, self._at = DecodingBatch(), self._clock()
        self._group: list[SimulatedSequence] = []
        self._phase, self._phase_end, self._rate = "", 0.0, 0.0
        self._standstill: tuple[float, int, asyncio.Future[None]] | None = None
        self._recompute = False
        self._slowdown = 1.0
        self._timer: asyncio.TimerHandle | None = None
        self._due = self._link_free = 0.0
        self._cache = SimulatedPrefixCache()
        self.on_change: Callable[[], None] | None = None  # it began to work, or has no more work
        self._was_idle = True

    @property
    def idle(self) -> bool:
        return not self._batch.count and not self._phase

    # Requests

    async def generate(self, request: GenerationRequest) -> Completion:
        tokens, finish = self._response(request)
        fetched = 0
        if request.kv_from is not None and request.kv_from != self.url:
            fetched = self._cache.missing(request)
            self._link_free = max(self._link_free, self._clock()) + fetched * self._cost.link  # one after the other
            await asyncio.sleep(self._link_free - self._clock())
        return await self._serve(request, tokens, finish, fetched)

    async def prefill(self, request: GenerationRequest) -> int:
        return (await self._serve(request, 0, "stop", 0)).prompt

    async def _serve(self, request: GenerationRequest, target: int, finish: Finish, fetched: int) -> Completion:
        length = self._context(request)
        kept = self._cache.take(request, length)
        cached = length - 1 if fetched else kept
        result: asyncio.Future[Completion] = self._loop.create_future()
        sequence = SimulatedSequence(
            request=request,
            result=result,
            length=length,
            new=length - cached,
            target=target,
            finish=finish,
            began=self._clock(),
            cached=cached,
            fetched=fetched,
        )
        self._waiting.append(sequence)
        self._interrupt()
        try:
            return await result
        except asyncio.CancelledError:
            sequence.cancelled = True
            if sequence.decoding:
                self._advance()
                self._batch.leave(sequence)
                if not self._phase:
                    self._schedule()
            raise

    async def abort(self, request_id: str) -> None:
        """Cancelling `generate` is enough."""

    async def status(self) -> EngineStatus:
        self._advance()
        kv = self._cost.kv_bytes
        return EngineStatus(
            version=self.version,
            running=self._batch.count + len(self._group),
            waiting=len(self._waiting),
            kv_bytes=int(self._batch.context) * kv,
            kv_budget=self._kv_tokens * kv,
            prefilled=self.prefilled,
            generated=self.generated,
            swaps=self.swaps,
            busy_s=self.times.busy,
        )

    # Contention for cores

    def set_slowdown(self, factor: float) -> None:
        """From now on passes take `factor` times as long as they would alone, the current one included."""
        self._advance()
        ratio, self._slowdown = factor / self._slowdown, factor
        if self._phase in ("prefill", "recompute"):
            self._phase_end = self._at + (self._phase_end - self._at) * ratio
            self._rate /= ratio
        self._schedule()

    # Weights

    async def load(self, publication: Publication) -> LoadResult:
        """Fetches the weights while it generates, then stands still between two passes to swap them in."""
        loaded = await self._weights.fetch(publication.version)
        done: asyncio.Future[None] = self._loop.create_future()
        self._standstill = (loaded.exposed_s, publication.version, done)
        self._interrupt()
        await done
        return loaded

    # From event to event

    def _advance(self) -> None:
        """Bring the state up to now; nothing has ended since the last call."""
        now = self._clock()
        seconds = now - self._at
        if seconds <= 0.0:
            return
        self._at = now
        batch, phase = self._batch, self._phase
        if phase:
            steps = self._rate * seconds
            if phase == "prefill":
                self.times.prefill += seconds
            else:
                self.times.weights += seconds
        elif batch.count:
            fixed, slope = self._cost.decode(batch.count, batch.context)
            steps = steps_in(seconds / self._slowdown, fixed, slope, batch.count, batch.context)
            self.times.decode += seconds
        else:
            return
        batch.advance(steps)

    def _interrupt(self) -> None:
        """Begin what has arrived, unless a phase goes on: its end does so."""
        if not self._phase:
            self._advance()
            self._schedule()

    def _schedule(self) -> None:
        """Begin the next phase if there is none, and set the timer for what ends first."""
        if not self._phase:
            self._begin()
        if self.on_change is not None and self._was_idle != self.idle:
            self._was_idle = not self._was_idle
            self.on_change()
        due = self._phase_end if self._phase else math.inf
        if (end := self._batch.next_end()) is not None:
            due = min(due, self._first_end(end - self._batch.steps))
        if self._timer is not None:
            if due == self._due:
                return
            self._timer.cancel()
            self._timer = None
        self._due = due
        if due < math.inf:
            self._timer = self._loop.call_at(due, self._wake)

    def _first_end(self, left: float) -> float:
        """When `left` steps are done, or the KV is full."""
        if self._phase:
            return self._at + max(0.0, left) / self._rate if self._rate else math.inf
        batch, context = self._batch.count, self._batch.context
        if batch > 1:
            left = min(left, (self._kv_tokens - context) / batch)
        fixed, slope = self._cost.decode(batch, context)
        return self._at + self._slowdown * seconds_of(max(left, CLOSE), fixed, slope, batch, context)

    def _wake(self) -> None:
        self._timer = None
        self._advance()
        for sequence in self._batch.pop_ended():
            self._finish(sequence)
        if self._phase and self._at >= self._phase_end - 1e-12:
            self._end_phase()
        if self._batch.count > 1 and self._batch.context >= self._kv_tokens - CLOSE:
            self._preempt()
        self._schedule()

    # Phases

    def _begin(self) -> None:
        if self._standstill is not None:
            self._enter("weights", self._standstill[0], 0.0)
        elif self._recompute:
            context = self._batch.context
            attended, passes = context * context / max(1, self._batch.count) / 2, max(1.0, context / self._chunk)
            seconds = self._slowdown * self._cost.mixed(
                tokens=int(context), attended=attended, kv=0.0, passes=passes, batch=0, context=0.0
            )
            self._enter("recompute", seconds, 0.0)
        elif self._waiting:
            self._begin_prefill()

    def _enter(self, phase: str, seconds: float, rate: float) -> None:
        self._phase, self._phase_end, self._rate = phase, self._at + seconds, rate

    def _begin_prefill(self) -> None:
        """Prefill as many waiting sequences as fit into one pass, or the first alone in several."""
        group, tokens, attended, kv = self._group, 0, 0.0, 0.0
        batch, context = self._batch.count, self._batch.context
        while self._waiting and batch + len(group) < self._max_batch:
            sequence = self._waiting[0]
            if sequence.cancelled:
                self._waiting.popleft()
                continue
            context_length = sequence.length + sequence.made
            full = context + kv + context_length > self._kv_tokens * (1 - _SPARE)
            if (group and tokens + sequence.new > self._chunk) or (full and (batch or group)):
                break
            self._waiting.popleft()
            if sequence.admitted < 0.0:
                sequence.admitted = self._at
            group.append(sequence)
            tokens += sequence.new
            attended += sequence.new * (context_length - sequence.new / 2)
            kv += context_length
        if not group:
            return
        self._evict(kv)
        self.prefilled += tokens
        passes = max(1.0, tokens / self._chunk)
        seconds = self._slowdown * self._cost.mixed(
            tokens=tokens,
            attended=attended,
            kv=kv,
            passes=passes,
            batch=batch,
            context=context,
            prompts=len(group),
        )
        self._enter("prefill", seconds, passes / seconds if batch else 0.0)

    def _end_phase(self) -> None:
        phase, self._phase = self._phase, ""
        if phase == "weights":
            assert self._standstill is not None
            _, self.version, done = self._standstill
            self._standstill = None
            self.swaps += 1
            self._batch.swap(self.version)
            if not self._keeps_kv:
                self._cache.clear()
                self._recompute = self._batch.count > 0
            if not done.done():
                done.set_result(None)
        elif phase == "recompute":
            self._recompute = False
        else:
            for sequence in self._group:
                if not sequence.cancelled:
                    self._join(sequence)
            self._group.clear()

    def _join(self, sequence: SimulatedSequence) -> None:
        """Its prefill is done, which sampled its first token."""
        if sequence.first < 0.0:
            sequence.first = self._at
        if sequence.target:
            sequence.made += 1
            sequence.spans.append((self.version, 1))
        sequence.base = sequence.length + sequence.made
        left = sequence.target - sequence.made
        if left < 1 - CLOSE:
            self._finish(sequence)
        else:
            self._batch.join(sequence, left)

    def _preempt(self) -> None:
        """The last to join goes back to the queue and keeps its tokens."""
        batch = self._batch
        sequence = batch.last()
        batch.record_versions(sequence)
        sequence.made += batch.steps - sequence.joined
        batch.leave(sequence)
        sequence.new = math.ceil(sequence.length + sequence.made)
        self._waiting.appendleft(sequence)
        self.preempted += 1

    def _evict(self, needed: float) -> None:
        self._cache.evict(self._kv_tokens - self._batch.context - needed)

    def _finish(self, sequence: SimulatedSequence) -> None:
        if sequence.target > sequence.made:
            self._batch.record_versions(sequence)
        if sequence.length == len(sequence.request.tokens):
            self._cache.put(sequence.request.session, sequence.length + sequence.target - 1)
        self._evict(0.0)
        self.generated += sequence.target
        if not sequence.result.done():
            sequence.result.set_result(sequence.completion(self._at))
