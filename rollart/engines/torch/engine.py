"""The engine as the control plane sees it: coroutines outside, one stepping thread inside.

Invariants: only the stepping thread touches the stepper's state; everything else reaches it as a command in a queue,
run between two steps; only the KV cache may be read from outside, under its own lock. Completions and streamed tokens
go back to the event loop once a step, all in one call. An idle engine blocks on the queue. A step that raises fails the
requests in flight, each with the reason, and the engine goes on. A request whose KV is being fetched from another
engine reaches the stepper when the fetch has ended, successfully or not. Every request ends exactly once; cancelling a
call aborts its request.
"""

import asyncio
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rollart.config import EngineConfig
from rollart.core.errors import EngineFailed, RollartError
from rollart.core.types import Completion, EngineStatus, GenerationRequest, Hop, LoadResult, Publication, TokenPart
from rollart.engines.contexts import StreamRequest
from rollart.engines.torch.kv_cache import FetchedKV
from rollart.engines.torch.kv_transfer import KVFetcher, KVRequest, KVServer
from rollart.engines.torch.model import EngineModel, PreparedWeights
from rollart.engines.torch.pace import EmulatedLink, Pacer, emulation_label
from rollart.engines.torch.sequence import EngineSequence
from rollart.engines.torch.stepper import Stepper
from rollart.hardware.roofline import Roofline

T = TypeVar("T")
CLOSE_S = 30.0
NICE = 10


class LoadedWeights(Protocol):
    """The tensors of a version, unchanged until `release`."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def bytes(self) -> int: ...

    @property
    def transport(self) -> str: ...

    @property
    def hops(self) -> tuple[Hop, ...]: ...

    @property
    def relay(self) -> str: ...

    def release(self) -> None: ...


class WeightSource(Protocol):
    """Source of versions; `rollart.weights.reader.WeightReader` is one."""

    def fetch(self, publication: Publication) -> LoadedWeights:
        """Blocks until the version is complete and checked. Raises RollartError."""
        ...


class TorchEngine:
    """Use as an async context manager, or call `start` and `close`. `kv_server` serves KV to other engines. `emulate`
    paces it to the roofline of a device."""

    def __init__(
        self,
        model: EngineModel,
        config: EngineConfig,
        *,
        store: WeightSource | None = None,
        version: int = 0,
        seed: int = 0,
        emulate: Roofline | None = None,
        key: str | None = None,
    ) -> None:
        self._pacer = None if emulate is None else Pacer(emulate)
        self._stepper = Stepper(model, config, version=version, seed=seed, pacer=self._pacer)
        self.kv_server = KVServer(self._stepper.kv_cache, model.layout)
        self._emulated = "" if emulate is None else emulation_label(emulate)
        self._fetcher = KVFetcher(model.layout, None if emulate is None else EmulatedLink(emulate), key)
        self._fetching: dict[str, tuple[EngineSequence, asyncio.Task[FetchedKV | None]]] = {}
        self._model = model
        self._threads = config.thread_count
        self._drain = config.on_swap == "drain"
        self._store = store
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: dict[str, tuple[EngineSequence, asyncio.Future[Completion]]] = {}
        self._thread = threading.Thread(target=self._run, name="stepper", daemon=True)
        self._loading = asyncio.Lock()
        self._fetching_thread = ThreadPoolExecutor(1, "weights", initializer=_give_way)
        self._held: LoadedWeights | None = None  # the model's weights
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> "TorchEngine":
        self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def start(self) -> None:
        """Call once, in the event loop that will use the engine."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Ends the thread after its current step; open requests fail."""
        self._commands.put(None)
        if self._pacer is not None:
            self._pacer.stop()
        for _, fetch in self._fetching.values():
            fetch.cancel()
        await self._fetcher.close()
        self._fetching_thread.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            raise EngineFailed(f"the engine's current step did not end within {CLOSE_S:g} s")
        for _, future in self._open.values():
            if not future.done():
                future.set_exception(EngineFailed("the engine was closed"))
        if self._held is not None:
            self._held.release()

    async def generate(self, request: GenerationRequest) -> Completion:
        return await self._run_through(self._stepper.accept(request), request.kv_from)

    async def stream(self, streamed: StreamRequest, on_part: Callable[[object], None]) -> Completion:
        """Calls `on_part` with new tokens as they are generated, except the last ones."""
        sequence = self._stepper.accept(streamed.request)
        sequence.stream_every, sequence.on_part = streamed.every, on_part
        return await self._run_through(sequence, streamed.request.kv_from)

    async def prefill(self, request: GenerationRequest) -> int:
        """Computes its KV and caches it under its session; returns the number of tokens computed."""
        if len(request.tokens) < 2:
            return 0
        sequence = self._stepper.accept_prefill(request)
        await self._run_through(sequence, request.kv_from)
        return sequence.computed - sequence.cached

    async def _run_through(self, sequence: EngineSequence, kv_from: str | None) -> Completion:
        if not self._thread.is_alive():
            raise EngineFailed("the engine is not running")
        if sequence.id in self._open:
            raise EngineFailed(f"request {sequence.id!r} is already in flight; give each request an id of its own")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._open[sequence.id] = sequence, future
        try:
            fetched = None if kv_from is None else await self._fetched(sequence, kv_from)
            if not future.done():
                self._commands.put(partial(self._stepper.add, sequence, fetched))
            return await future
        except asyncio.CancelledError:
            self._commands.put(partial(self._stepper.abort, sequence.id))
            raise
        finally:
            del self._open[sequence.id]

    async def _fetched(self, sequence: EngineSequence, url: str) -> FetchedKV | None:
        """KV of it that the engine at `url` has and this one lacks."""
        most = len(sequence.tokens) - 1
        _, own, version = self._stepper.kv_cache.find(sequence.session, sequence.tokens, sequence.blocks)
        if own >= most:
            return None
        request = KVRequest(sequence.session, sequence.tokens[:most], own, version, self._model.layout.name)
        fetch = asyncio.create_task(self._fetcher.fetch(url, request, sequence.blocks))
        self._fetching[sequence.id] = sequence, fetch
        try:
            await asyncio.wait((fetch,))
        finally:
            del self._fetching[sequence.id]
            fetch.cancel()
        return None if fetch.cancelled() else fetch.result()

    async def abort(self, request_id: str) -> None:
        if request_id not in self._fetching:
            self._commands.put(partial(self._stepper.abort, request_id, keep=True))
            return
        sequence, fetch = self._fetching[request_id]
        fetch.cancel()
        sequence.finish, sequence.ended = "abort", time.perf_counter()
        self._deliver([sequence])

    async def load(self, publication: Publication) -> LoadResult:
        """Fetches and checks the weights while generation goes on; only the swap is done between two steps."""
        version = publication.version
        if self._store is None:
            raise EngineFailed(f"version {version} cannot be loaded: this engine has no weight store")
        async with self._loading:
            began = time.perf_counter()
            try:
                loop = asyncio.get_running_loop()
                held, weights = await loop.run_in_executor(self._fetching_thread, self._fetch, self._store, publication)
            except RollartError as error:
                raise EngineFailed(f"version {version} was not loaded: {error}") from error
            seconds = time.perf_counter() - began
            try:
                swapped = await self._between_steps(partial(self._stepper.swap, version, weights), empty=self._drain)
            finally:
                # Swapped or not, a version that may be in use is not released before the next swap.
                before, self._held = self._held, held
            if before is not None:
                before.release()
            return replace(
                swapped,
                transfer_s=seconds,
                bytes=held.bytes,
                transport=held.transport,
                hops=held.hops,
                relay=held.relay,
            )

    def _fetch(self, store: WeightSource, publication: Publication) -> tuple[LoadedWeights, PreparedWeights]:
        held = store.fetch(publication)
        try:
            return held, self._model.prepare(held.tensors)
        except BaseException:
            held.release()
            raise

    async def status(self) -> EngineStatus:
        status = await self._between_steps(self._stepper.status)
        fetching = [sequence for sequence, _ in self._fetching.values()]
        return replace(
            status,
            waiting=status.waiting + len(fetching),
            kv_reserved=status.kv_reserved + sum(map(self._stepper.reserved, fetching)),
            emulated=self._emulated,
        )

    async def _between_steps(self, action: Callable[[], T], *, empty: bool = False) -> T:
        """Runs `action` between two steps. `empty`: once nothing runs; nothing is admitted until then."""
        if not self._thread.is_alive():
            raise EngineFailed("the engine is not running")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def command() -> None:
            try:
                _post(loop, _settle, future, action(), None)
            except Exception as error:
                _post(loop, _settle, future, None, error)

        self._commands.put(partial(self._stepper.when_empty, command) if empty else command)
        return await future

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        stepper, going = self._stepper, True
        while going:
            try:
                going = self._run_commands()
                if going and stepper.busy:
                    stepper.step()
            except Exception as error:
                stepper.fail(f"a generation step failed: {type(error).__name__}: {error}")
            streamed, ended = stepper.streamed(), stepper.ended()
            if (streamed or ended) and self._loop is not None:
                _post(self._loop, self._deliver, ended, streamed)

    def _run_commands(self) -> bool:
        """Runs the queued commands, and waits for one if the engine is idle. False: close."""
        wait = not self._stepper.busy
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _deliver(self, ended: list[EngineSequence], streamed: Sequence[tuple[EngineSequence, TokenPart]] = ()) -> None:
        for sequence, part in streamed:
            if sequence.on_part is not None:
                sequence.on_part(part)
        for sequence in ended:
            owner, future = self._open.get(sequence.id, (None, None))
            # A cancelled caller may have come back with the same id.
            if future is None or owner is not sequence or future.done():
                continue
            try:
                future.set_result(sequence.completion())
            except EngineFailed as error:
                future.set_exception(error)


def _give_way() -> None:
    """Lower priority than the stepping thread; only Linux has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Schedules a call in the event loop, unless that is closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)


def _settle(future: asyncio.Future[Any], value: object, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
