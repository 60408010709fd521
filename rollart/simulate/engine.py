"""A modelled engine: continuous batching in closed form, from one event to the next.

Invariants
- Time is cut into phases. In a phase of its own the engine prefills a chunk for some sequences while the others decode
  along, stands still for new weights, or computes KV again under them; outside, it only decodes. State changes at
  arrivals while it only decodes, at ends of phases and of sequences, and never in between.
- When the KV of decoding, prefilled and parked sequences does not fit, parked KV goes first, the least recently used;
  then the sequence that joined last starts again later.
- KV of a finished turn is parked under its session, and comes back with the session's next turn. Members of a group
  that meet on an engine prefill their common prompt once.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rollart.core.types import Completion, EngineStatus, Finish, GenerationRequest, LoadResult
from rollart.simulate.clock import sleep
from rollart.simulate.cost import PassCost, seconds_of, steps_in
from rollart.simulate.decoding import CLOSE, Decoding
from rollart.simulate.prefixes import Prefixes
from rollart.simulate.sequence import Sequence
from rollart.simulate.weights import Weights

_SPARE = 0.01  # of the KV stays free when a sequence is admitted, so that the others can grow


@dataclass(slots=True)
class Times:
    """Seconds of an engine by what it did. The rest it was idle."""

    prefill: float = 0.0
    decode: float = 0.0
    weights: float = 0.0

    @property
    def busy(self) -> float:
        return self.prefill + self.decode


class FluidEngine:
    """`answer` says how many tokens a request will be answered with, and how it ends. `url` is for other engines that
    fetch KV from here."""

    def __init__(
        self,
        url: str,
        cost: PassCost,
        weights: Weights,
        answer: Callable[[GenerationRequest], tuple[int, Finish]],
        *,
        max_batch: int,
        chunk: int,
        kv_tokens: int,
        keeps_kv: bool = False,
    ) -> None:
        self.url, self.version, self.times = url, 0, Times()
        self.prefilled = self.generated = self.preempted = self.swaps = 0
        self._cost, self._weights, self._answer = cost, weights, answer
        self._max_batch, self._chunk, self._kv_tokens, self._keeps_kv = max_batch, chunk, kv_tokens, keeps_kv
        self._loop = asyncio.get_running_loop()
        self._clock: Callable[[], float] = self._loop.time
        self._waiting: deque[Sequence] = deque()
        self._batch, self._at = Decoding(), self._clock()
        self._group: list[Sequence] = []
        self._phase, self._phase_end, self._rate = "", 0.0, 0.0
        self._standstill: tuple[float, int, asyncio.Future[None]] | None = None
        self._recompute = False
        self._slowdown = 1.0
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._prefixes = Prefixes()

    @property
    def idle(self) -> bool:
        return not self._batch.count and not self._phase

    # Requests

    async def generate(self, request: GenerationRequest) -> Completion:
        wanted, finish = self._answer(request)
        fetched = 0
        if request.kv_from is not None and request.kv_from != self.url:
            fetched = len(request.tokens) - 1 - self._prefixes.of(request.session)
            await sleep(fetched * self._cost.link)
        return await self._serve(request, wanted, finish, fetched)

    async def prefill(self, request: GenerationRequest) -> int:
        return (await self._serve(request, 0, "stop", 0)).prompt

    async def _serve(self, request: GenerationRequest, wanted: int, finish: Finish, fetched: int) -> Completion:
        length = len(request.tokens)
        kept = self._prefixes.take(request)
        cached = length - 1 if fetched else kept
        answer: asyncio.Future[Completion] = self._loop.create_future()
        sequence = Sequence(request, answer, length, length - cached, wanted, finish, self._clock(), cached, fetched)
        self._waiting.append(sequence)
        if not self._phase:
            self._advance()
            self._go_on()
        try:
            return await answer
        except asyncio.CancelledError:
            self._withdraw(sequence)
            raise

    def _withdraw(self, sequence: Sequence) -> None:
        sequence.gone = True
        if sequence.decoding:
            self._advance()
            self._batch.leave(sequence)
            if not self._phase:
                self._go_on()

    async def abort(self, request_id: str) -> None:
        """A cancelled `generate` is enough."""

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

    # Cores that others use too

    def worked(self) -> float:
        """Seconds of work until now."""
        self._advance()
        return self.times.busy

    def slow(self, factor: float) -> None:
        """From now on passes take `factor` times as long as they would alone, this one too."""
        self._advance()
        ratio, self._slowdown = factor / self._slowdown, factor
        if self._phase in ("prefill", "recompute"):
            self._phase_end = self._at + (self._phase_end - self._at) * ratio
            self._rate /= ratio
        self._go_on()

    # Weights

    async def load(self, version: int) -> LoadResult:
        """Waits for the weights while it generates, then stands still between two passes to take them."""
        taken = await self._weights.fetched(version)
        done: asyncio.Future[None] = self._loop.create_future()
        self._standstill = (taken.exposed_s, version, done)
        if not self._phase:
            self._advance()
            self._go_on()
        await done
        return taken

    def _swap(self, version: int, done: "asyncio.Future[None]") -> None:
        self.version = version
        self.swaps += 1
        self._batch.swapped(version)
        if not self._keeps_kv:
            self._prefixes.clear()
            self._recompute = self._batch.count > 0
        if not done.done():
            done.set_result(None)

    # From event to event

    def _advance(self) -> None:
        """Bring the state to now, when nothing has ended since the last time."""
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
        batch.go_on(steps)

    def _go_on(self) -> None:
        """Begin the next phase if there is none, and set the timer for whatever ends first."""
        if not self._phase:
            self._begin()
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
        """When so many steps have been made, or there is no room for more."""
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
        for sequence in self._batch.ended():
            self._finish(sequence)
        if self._phase and self._at >= self._phase_end - 1e-12:
            self._end_phase()
        if self._batch.count > 1 and self._batch.context >= self._kv_tokens - CLOSE:
            self._preempt()
        self._go_on()

    # Phases

    def _begin(self) -> None:
        if self._standstill is not None:
            self._enter("weights", self._standstill[0], 0.0)
        elif self._recompute:
            context = self._batch.context
            attended, passes = context * context / max(1, self._batch.count) / 2, max(1.0, context / self._chunk)
            seconds = self._slowdown * self._cost.mixed(int(context), attended, 0.0, passes, 0, 0.0)
            self._enter("recompute", seconds, 0.0)
        elif self._waiting:
            self._begin_prefill()

    def _enter(self, phase: str, seconds: float, rate: float) -> None:
        self._phase, self._phase_end, self._rate = phase, self._at + seconds, rate

    def _begin_prefill(self) -> None:
        """As many of the waiting as fit into one pass, or the first alone in several."""
        group, tokens, attended, kv = self._group, 0, 0.0, 0.0
        batch, context = self._batch.count, self._batch.context
        while self._waiting and batch + len(group) < self._max_batch:
            sequence = self._waiting[0]
            if sequence.gone:
                self._waiting.popleft()
                continue
            held = sequence.length + sequence.made
            full = context + kv + held > self._kv_tokens * (1 - _SPARE)
            if (group and tokens + sequence.new > self._chunk) or (full and (batch or group)):
                break
            self._waiting.popleft()
            if sequence.admitted < 0.0:
                sequence.admitted = self._at
            group.append(sequence)
            tokens += sequence.new
            attended += sequence.new * (held - sequence.new / 2)
            kv += held
        if not group:
            return
        self._make_room(kv)
        self.prefilled += tokens
        passes = max(1.0, tokens / self._chunk)
        seconds = self._slowdown * self._cost.mixed(tokens, attended, kv, passes, batch, context)
        self._enter("prefill", seconds, passes / seconds if batch else 0.0)

    def _end_phase(self) -> None:
        phase, self._phase = self._phase, ""
        if phase == "weights":
            assert self._standstill is not None
            _, version, done = self._standstill
            self._standstill = None
            self._swap(version, done)
        elif phase == "recompute":
            self._recompute = False
        else:
            for sequence in self._group:
                if not sequence.gone:
                    self._join(sequence)
            self._group.clear()

    def _join(self, sequence: Sequence) -> None:
        """It is prefilled, and has one more token from that."""
        if sequence.first < 0.0:
            sequence.first = self._at
        if sequence.wanted:
            sequence.made += 1
            sequence.spans.append((self.version, 1))
        sequence.base = sequence.length + sequence.made
        left = sequence.wanted - sequence.made
        if left < 1 - CLOSE:
            self._finish(sequence)
        else:
            self._batch.join(sequence, left)

    def _preempt(self) -> None:
        """The last to join starts again later, when there is room; its tokens stay."""
        batch = self._batch
        sequence = batch.last()
        batch.note_versions(sequence)
        sequence.made += batch.steps - sequence.joined
        batch.leave(sequence)
        sequence.new = math.ceil(sequence.length + sequence.made)
        self._waiting.appendleft(sequence)
        self.preempted += 1

    def _make_room(self, more: float) -> None:
        self._prefixes.shrink(self._kv_tokens - self._batch.context - more)

    # Answers

    def _finish(self, sequence: Sequence) -> None:
        if sequence.wanted > sequence.made:
            self._batch.note_versions(sequence)
        self._prefixes.park(sequence.request.session, sequence.length + sequence.wanted - 1)
        self._make_room(0.0)
        self.generated += sequence.wanted
        if not sequence.answer.done():
            sequence.answer.set_result(sequence.completed(self._at))
