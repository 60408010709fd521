"""The engine without its thread: requests in, `step` after `step`, ended sequences out.

Invariants: everything here runs in one thread, except `accept`, `accept_prefill` and `EngineModel.prepare`, which read
only what never changes, and `kv_cache.find`, which has a lock. Between two steps the KV of every running sequence is
that of its first `computed` tokens. A sequence is admitted only when rows of its full possible length fit the budget,
so a running one never lacks memory; cached KV always gives way to rows; a request that could not run even alone is
refused at once, so the first in the queue always gets its turn. A sequence whose beginning another one is computing
right now waits for it and copies it; that one is running and gets its share of every step, so the wait ends. While a
swap waits for running sequences to end, none is admitted.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from rollart.config import EngineConfig
from rollart.core.errors import EngineFailed
from rollart.core.types import EngineStatus, Finish, GenerationRequest, LoadResult, Sampling, TokenPart
from rollart.engines.torch.batch import BatchState, Chunk
from rollart.engines.torch.kv_cache import FetchedKV, KVCache, PrefixHit, find_prefix
from rollart.engines.torch.kv_rows import KVRows
from rollart.engines.torch.model import EngineModel, PreparedWeights
from rollart.engines.torch.pace import Pacer, work_of
from rollart.engines.torch.prefix_cache import PrefixIndex
from rollart.engines.torch.sampler import sample
from rollart.engines.torch.sequence import EngineSequence, accepted
from rollart.engines.torch.step import StepInputs, step_inputs
from rollart.engines.torch.swap_cost import SwapCost

DEFERRED = 128  # how far down the queue to look for a sequence that need not wait for another's prefill


@dataclass(slots=True)
class Counters:
    prefilled: int = 0
    generated: int = 0
    swaps: int = 0
    busy_s: float = 0.0


class Stepper:
    """`pacer` paces the steps to an emulated device."""

    def __init__(
        self, model: EngineModel, config: EngineConfig, *, version: int = 0, seed: int = 0, pacer: Pacer | None = None
    ) -> None:
        self.version = version
        self.budget = config.kv_megabytes << 20
        self.counters = Counters()
        self.batch = BatchState()
        self.rows = KVRows(model.layout, config.max_batch, self.budget, model.kernels.copy_heads)
        self.kv_cache = KVCache(version)
        self._live: PrefixIndex[EngineSequence] = PrefixIndex()
        self._model = model
        self._config = config
        self._seed = seed
        self._pacer = pacer
        self._swap_cost = SwapCost()
        self._then: Callable[[], None] | None = None  # runs once the running sequences have ended
        self._full = 0  # their number when it was set
        self._ended: list[EngineSequence] = []
        self._streamed: list[tuple[EngineSequence, TokenPart]] = []

    @property
    def busy(self) -> bool:
        return bool(self.batch.running or self.batch.waiting or self._then)

    def accept(self, request: GenerationRequest) -> EngineSequence:
        """A sequence to `add`. Raises EngineFailed if the request can never be served."""
        model = self._model
        sequence = accepted(request, vocabulary=model.vocabulary, context=model.context, seed=self._seed)
        need = sequence.limit * model.layout.token_bytes
        if need > self.budget:
            raise EngineFailed(
                f"request {request.id!r} may grow to {sequence.limit} tokens, whose KV takes {need / 2**20:.1f} MB; "
                f"raise engine.kv_megabytes above {self._config.kv_megabytes} or lower max_tokens"
            )
        return sequence

    def accept_prefill(self, request: GenerationRequest) -> EngineSequence:
        """For a request of which only the KV is needed. That of its last token is of no use: to go on, an engine needs
        that token's logits and so computes it."""
        sequence = self.accept(replace(request, tokens=request.tokens[:-1], sampling=Sampling(max_tokens=1)))
        sequence.generates, sequence.limit = False, sequence.prompt
        return sequence

    def add(self, sequence: EngineSequence, fetched: FetchedKV | None = None) -> None:
        """`fetched` is KV for it from another engine; dropped if it is of other weights or there is no room."""
        if self._pacer is not None and not self.busy:
            self._pacer.rest()
        if fetched is not None and fetched.version == self.version and self._make_room(fetched.kv.nbytes):
            self.kv_cache.store_fetched(sequence.id, fetched)
        self.batch.waiting.append(sequence)

    @torch.inference_mode()
    def abort(self, request_id: str, *, keep: bool = False) -> None:
        """Ends a request, and may `keep` its KV; an unknown one has ended already."""
        for waiting in self.batch.waiting:
            if waiting.id == request_id:
                self.batch.waiting.remove(waiting)
                self.kv_cache.drop_fetched(request_id)
                self._end(waiting, "abort")
                return
        for row, running in enumerate(self.batch.running):
            if running.id == request_id:
                if keep:
                    self._store(row, running)
                self._leave(row)
                self._end(running, "abort")
                return

    def when_empty(self, action: Callable[[], None]) -> None:
        """Admits nothing until all running sequences have ended, then calls `action` and goes on."""
        self._then, self._full = action, self.batch.size

    @torch.inference_mode()
    def swap(self, version: int, weights: PreparedWeights) -> LoadResult:
        """Replaces the weights with requests in flight. `engine.on_swap` says what happens to KV of the old ones."""
        began = time.perf_counter()
        for running in self.batch.running:
            running.stamp(self.version)
        self._model.replace(weights)
        self.version = version
        self.counters.swaps += 1
        keep = self._config.on_swap == "keep"
        recompute_s = self._swap_cost.record_swap(self.kv_cache.set_version(version, keep=keep))
        recomputed = 0 if keep else sum(running.computed for running in self.batch.running)
        if not keep:
            self.batch.restart()
            self._live.clear()
        exposed_s = time.perf_counter() - began + self._swap_cost.take_drain_s()
        return LoadResult(version, exposed_s=exposed_s, recomputed=recomputed, recompute_s=recompute_s)

    @torch.inference_mode()
    def step(self) -> None:
        """One forward pass: a token for every decoding sequence, and a chunk of prefill."""
        if self._then is not None and not self.batch.running:
            action, self._then = self._then, None
            action()
        began = time.perf_counter()
        if self._then is None:
            self._admit()
        if not self.batch.running:
            return
        size, decoding, chunks = self.batch.size, self.batch.decoding, self.batch.chunks(self._config.prefill_chunk)
        step = step_inputs(self.batch, chunks, self.rows.tensors)
        logits = self._model.forward(step)
        self._record_experts(chunks)
        tokens, logprobs = self._sampled(logits, step)
        if self._pacer is not None:
            self._pacer.pace(began, work_of(self.batch, chunks))
        for sequence in self.batch.running[: self.batch.decoding]:
            sequence.computed += 1
        for chunk in chunks:
            self.batch.running[chunk.row].computed += chunk.count
        self.counters.prefilled += sum(chunk.count for chunk in chunks)
        seconds = time.perf_counter() - began
        self._swap_cost.record_step(self.batch.running, decoding, chunks, seconds)
        if self._then is not None:
            self._swap_cost.record_drain(1 - size / self._full, seconds)
        self._record(step, tokens, logprobs)
        self.counters.busy_s += time.perf_counter() - began

    def _sampled(self, logits: torch.Tensor, step: StepInputs) -> tuple[list[int], list[float]]:
        """As lists, which waits for a device that computes in the background."""
        if not step.sampled:
            return [], []
        tokens, logprobs = sample(logits, step.sampled, self._model.kernels.draw)
        return tokens.tolist(), logprobs.tolist()

    def _record_experts(self, chunks: Sequence[Chunk]) -> None:
        """Of the tokens that were just computed, before they count as computed."""
        rows, recorder = self._model.expert_rows(), self._model.experts
        if rows is None or recorder is None:
            return
        shape, at = recorder.shape, self.batch.decoding * recorder.shape.row
        for number, sequence in enumerate(self.batch.running[: self.batch.decoding]):
            sequence.record_experts(sequence.computed, rows[number * shape.row : (number + 1) * shape.row], shape)
        for chunk in chunks:
            size = chunk.count * shape.row
            self.batch.running[chunk.row].record_experts(chunk.start, rows[at : at + size], shape)
            at += size

    def _record(self, step: StepInputs, tokens: list[int], logprobs: list[float]) -> None:
        now, generated = time.perf_counter(), 0
        broken = not math.isfinite(sum(logprobs))
        over: list[EngineSequence] = []
        for sequence, token, logprob in zip(step.sampled, tokens, logprobs, strict=True):
            if broken and not math.isfinite(logprob):
                sequence.error = f"version {self.version} of the model gave logits that are not finite"
                over.append(sequence)
                continue
            if not sequence.generates:
                over.append(sequence)
                continue
            all_tokens, all_logprobs = sequence.tokens, sequence.logprobs
            if not all_logprobs:
                sequence.first = now
            all_tokens.append(token)
            all_logprobs.append(logprob)
            generated += 1
            if token in sequence.stop or len(all_tokens) >= sequence.limit:
                over.append(sequence)
            elif sequence.stream_every and (
                not sequence.streamed or len(all_logprobs) - sequence.streamed >= sequence.stream_every
            ):
                self._streamed.append((sequence, sequence.next_part(self.version)))
        self.counters.generated += generated
        self.batch.settle()
        for sequence in over:
            row = self.batch.running.index(sequence)
            if sequence.error is None:
                self._store(row, sequence)
            self._leave(row)
            self._end(sequence, "stop" if sequence.tokens[-1] in sequence.stop else "length")

    def _admit(self) -> None:
        batch = self.batch
        budget = self._config.prefill_chunk - batch.prefilling
        deferred: list[EngineSequence] = []
        longest = batch.longest
        while batch.waiting and batch.size < self._config.max_batch and budget > 0 and len(deferred) < DEFERRED:
            sequence = batch.waiting[0]
            expected = batch.size + len(batch.waiting)
            size = self.rows.size_for(batch.size + 1, max(sequence.limit, longest), expected)
            if size is None:
                break
            batch.waiting.popleft()
            hit = find_prefix(sequence, self.kv_cache, self._live)
            if hit is None:
                deferred.append(sequence)
                continue
            self.kv_cache.drop(sequence.session)
            self.kv_cache.drop_fetched(sequence.id)
            self.kv_cache.shrink(self.budget - size[0] * size[1] * self.rows.layout.token_bytes)
            self.rows.resize(*size, live=batch.size, kept=max((one.computed for one in batch.running), default=0))
            longest = max(longest, sequence.limit)
            row = batch.admit(sequence)
            self._live.add(sequence, sequence.blocks)
            self._begin(row, sequence, hit)
            budget -= sequence.pending
        batch.waiting.extendleft(reversed(deferred))
        batch.settle()

    def _begin(self, row: int, sequence: EngineSequence, hit: PrefixHit) -> None:
        hit.copy(row, self.rows, self.batch.running)
        if self._model.experts is not None:
            shape = self._model.experts.shape
            sequence.record_experts(0, hit.experts(shape.row), shape)
        sequence.computed = hit.length
        if not sequence.admitted:
            sequence.admitted = time.perf_counter()
            self._swap_cost.mark_lost(sequence)
            sequence.cached = hit.length
            sequence.fetched = hit.length - hit.own

    def _store(self, row: int, sequence: EngineSequence) -> None:
        if self._make_room(sequence.computed * self.rows.layout.token_bytes):
            kv = self.rows.read(row, sequence.computed)
            self.kv_cache.store(sequence.session, sequence.tokens[: sequence.computed], kv, bytes(sequence.experts))

    def _make_room(self, size: int) -> bool:
        """Evicts cached KV until `size` more bytes fit; False if they cannot."""
        room = self.budget - self.rows.bytes
        if not 0 < size <= room:
            return False
        self.kv_cache.shrink(room - size)
        return True

    def _leave(self, row: int) -> None:
        self._live.remove(self.batch.running[row])
        for move in self.batch.remove(row):
            self.rows.copy(move.source, move.target, self.batch.running[move.target].computed)

    def _end(self, sequence: EngineSequence, finish: Finish) -> None:
        sequence.stamp(self.version)
        sequence.ended = time.perf_counter()
        sequence.finish = finish
        self._ended.append(sequence)

    def ended(self) -> list[EngineSequence]:
        """The sequences that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def streamed(self) -> list[tuple[EngineSequence, TokenPart]]:
        """The tokens to stream since the last call."""
        streamed, self._streamed = self._streamed, []
        return streamed

    def fail(self, reason: str) -> None:
        """Ends everything with an error and drops all KV, after a step that failed half-way."""
        for sequence in self.batch.clear():
            sequence.error = reason
            self._end(sequence, "abort")
        self.kv_cache.clear()
        self._live.clear()

    def status(self) -> EngineStatus:
        return EngineStatus(
            version=self.version,
            running=self.batch.size,
            waiting=len(self.batch.waiting),
            kv_bytes=self.rows.bytes + self.kv_cache.bytes,
            kv_budget=self.budget,
            prefilled=self.counters.prefilled,
            generated=self.counters.generated,
            swaps=self.counters.swaps,
            busy_s=self.counters.busy_s,
            late_s=0.0 if self._pacer is None else self._pacer.late_s,
            kv_reserved=sum(map(self.reserved, (*self.batch.running, *self.batch.waiting))),
        )

    def reserved(self, sequence: EngineSequence) -> int:
        """The bytes of its KV at its full possible length."""
        return sequence.limit * self.rows.layout.token_bytes
