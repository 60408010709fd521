"""Teachers of a run: services that score what the policy sampled, or APIs of vLLM that return prompt logprobs.

A trajectory is taught when it has its reward, on its own clock, so that training never waits for a teacher. Invariants:
a task has one teacher, whose pool may have several workers, used in turn; a teacher that fails is asked again, then the
trajectory ends as `reward_failed`: it is replaced, and never trained without its teacher. A service that ends is
started again, with backoff, while trajectories wait for it; one that keeps ending soon after its start ends the run.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec

from rollart.config import RunFile
from rollart.core.column import Column
from rollart.core.errors import ConfigError, RewardFailed, ServiceError
from rollart.core.events import EventSink, ServiceEnded, Warned
from rollart.core.teaching import ScoreRequest, Teaching
from rollart.core.types import Sample
from rollart.launch import rpc
from rollart.launch.launcher import Launcher, ServiceHandle, relaunch, service_command, service_started
from rollart.models.folder import read_seconds
from rollart.placement.bindings import Binding

ATTEMPTS = 3
RETRY_S = 1.0
MAX_LIVES, SETTLED_S = 4, 60.0  # in a row that were shorter than that
MAX_RESTARTS, MAX_BACKOFF_S = 30, 30.0


class _Teacher(Protocol):
    async def teach(self, sample: Sample, count: int) -> Teaching:
        """With `count` of its likeliest tokens. Raises ServiceError."""
        ...


class _ScorerService:
    """One worker of a pool: a process of ours."""

    def __init__(self, run: RunFile, binding: Binding, folder: Path, launcher: Launcher, logs: Path) -> None:
        self._launcher, self._binding, self._deadline = launcher, binding, run.engine.deadline
        spec = {"model": str(folder.absolute()), "threads": run.engine.thread_count, "classes": binding.choices}
        command = service_command(
            "rollart.training.scorer", spec, name=binding.worker, logs=logs, threads=run.engine.thread_count
        )
        deadline = run.engine.start_deadline + read_seconds(folder)
        self._command = replace(command, start_deadline=deadline, start_key="engine.start_deadline")
        self._started: ServiceHandle | None = None
        self._stack = AsyncExitStack()
        self._client: rpc.RpcClient
        self._up = asyncio.Event()

    async def start(self, sink: EventSink) -> None:
        clock = asyncio.get_running_loop().time
        began, old, request = clock(), self._started, self._binding.request()
        if old is None:
            self._started = await self._launcher.launch(self._command, request)
        else:
            self._started = await relaunch(self._launcher, self._command, request, old)
        url = str(self._started.answer["url"])
        try:
            self._client = await self._stack.enter_async_context(rpc.connected(url, key=self._launcher.key))
        except BaseException:
            await self._started.stop()
            raise
        self._up.set()
        sink.emit(service_started("teacher", self._started.name, self._started, clock() - began))
        sink.emit(self._binding.placed(self._started))

    async def watch(self, sink: EventSink) -> None:
        clock, name, lives = asyncio.get_running_loop().time, self._binding.worker, 0
        while True:
            assert self._started is not None
            since = clock()
            reason = await self._started.wait()
            self._up.clear()
            await self._stack.aclose()
            sink.emit(ServiceEnded(role="teacher", name=name, reason=reason))
            lives = 0 if clock() - since > SETTLED_S else lives + 1
            if lives == MAX_LIVES:
                raise ServiceError(f"the teacher {name} ended {lives} times soon after its start, the last: {reason}")
            await self._restart(sink)

    async def _restart(self, sink: EventSink) -> None:
        for attempt in range(1, MAX_RESTARTS + 1):
            try:
                await self.start(sink)
            except ServiceError as error:
                if attempt == MAX_RESTARTS:
                    raise
                sink.emit(Warned(message=f"the teacher {self._binding.worker} is not back yet: {error}"))
            else:
                return
            await asyncio.sleep(min(MAX_BACKOFF_S, RETRY_S * 2 ** (attempt - 1)))

    async def stop(self) -> None:
        await self._stack.aclose()
        if self._started is not None:
            await self._started.stop()

    async def teach(self, sample: Sample, count: int) -> Teaching:
        try:
            async with asyncio.timeout(self._command.start_deadline):
                await self._up.wait()
        except TimeoutError:
            raise ServiceError(f"the teacher {self._binding.worker} is still being started again") from None
        request = ScoreRequest(sample.tokens, Column.flags(sample.mask), sample.temperature, count)
        return await self._client.call("score", request, returns=Teaching, deadline=self._deadline)


class _Endpoint:
    """vLLM's API: `prompt_logprobs` of tokens. They are those of temperature 1."""

    def __init__(self, url: str, model: str, session: aiohttp.ClientSession, deadline: float) -> None:
        self._url, self._model, self._session = f"{url.rstrip('/')}/completions", model, session
        self._timeout = aiohttp.ClientTimeout(total=deadline)

    async def teach(self, sample: Sample, count: int) -> Teaching:
        tokens = sample.tokens.array.tolist()
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": count}
        try:
            async with self._session.post(
                self._url, json=body, timeout=self._timeout, allow_redirects=False
            ) as response:
                answer = await response.json(content_type=None)
                if response.status != 200:
                    raise ServiceError(
                        f"the teacher at {self._url} answered HTTP {response.status}: {str(answer)[:200]}"
                    )
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ServiceError(f"the teacher at {self._url} did not answer: {error or type(error).__name__}") from error
        return prompt_logprobs(answer, tokens, sample.mask.tolist(), count)


def prompt_logprobs(answer: Any, tokens: Sequence[int], mask: Sequence[bool], count: int = 0) -> Teaching:
    """The logprobs of the tokens where `mask` is set, from a completion of vLLM, and of the `count` likeliest ones
    there. Raises ServiceError."""
    try:
        rows = answer["choices"][0]["prompt_logprobs"]
        if len(rows) != len(tokens):
            raise ServiceError(f"the teacher returned logprobs of {len(rows)} tokens, not of {len(tokens)}")
        scored = [(row, str(token)) for row, token, wanted in zip(rows, tokens, mask, strict=True) if wanted]
        logprobs = Column.floats([float(row[token]["logprob"]) for row, token in scored])
        if not count:
            return Teaching(logprobs)
        top = [(int(token), float(one["logprob"])) for row, _ in scored for token, one in _ranked(row, count)]
        ids, values = Column.ints([token for token, _ in top]), Column.floats([value for _, value in top])
        return Teaching(logprobs, count, ids, values)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServiceError(
            f"the teacher's answer has no prompt_logprobs of the tokens, as vLLM's has: {str(answer)[:200]}"
        ) from error


def _ranked(row: Any, count: int) -> list[tuple[str, Any]]:
    """The likeliest tokens; the one that was sampled may be in the row besides."""
    best = sorted(row.items(), key=lambda item: -float(item[1]["logprob"]))[:count]
    if len(best) < count:
        raise ServiceError(f"the teacher returned {len(best)} of its likeliest tokens, not {count}; raise its limit")
    return best


class Teachers:
    """Implements `rollart.core.protocols.TeacherInvoker`."""

    def __init__(
        self,
        run: RunFile,
        bindings: Sequence[Binding],
        *,
        student: Path,
        launcher: Launcher,
        logs: Path,
        sink: EventSink,
    ) -> None:
        self._run, self._sink, self._stack = run, sink, AsyncExitStack()
        self._endpoints = [binding for binding in bindings if binding.url]
        self._services: dict[str, list[_ScorerService]] = {}
        for binding in bindings:
            if not binding.url:
                folder = Path(str(run.pools[binding.pool].model))
                _check_vocabulary(student, folder, binding.pool)
                service = _ScorerService(run, binding, folder, launcher, logs)
                self._services.setdefault(binding.pool, []).append(service)
        self._turns: Mapping[str, cycle[_Teacher]] = {}
        # A pass has samples of all tasks, with equally many of the likeliest tokens: a loss takes those that it wants.
        self._count = max(algorithm.likeliest for algorithm in run.algorithms())

    async def start(self) -> None:
        session = await self._stack.enter_async_context(aiohttp.ClientSession())
        pools: dict[str, list[_Teacher]] = {pool: list(workers) for pool, workers in self._services.items()}
        for binding in self._endpoints:
            endpoint = _Endpoint(
                binding.url, str(self._run.pools[binding.pool].model), session, self._run.engine.deadline
            )
            pools.setdefault(binding.pool, []).append(endpoint)
        for worker in self._workers():
            self._stack.push_async_callback(worker.stop)
        await asyncio.gather(*(worker.start(self._sink) for worker in self._workers()))
        self._turns = {
            task.name: cycle(pools[pool])
            for task in self._run.tasks
            if (pool := self._run.teacher_of(task)) is not None
        }

    async def close(self) -> None:
        await self._stack.aclose()

    async def watch(self) -> None:
        """Never returns; raises ServiceError when a teacher cannot be brought back."""
        async with asyncio.TaskGroup() as group:
            for worker in self._workers():
                group.create_task(worker.watch(self._sink))
            await asyncio.Event().wait()

    def _workers(self) -> list[_ScorerService]:
        return [worker for workers in self._services.values() for worker in workers]

    async def teach(self, task: str, samples: Sequence[Sample]) -> tuple[Teaching, ...]:
        turns = self._turns.get(task)
        if turns is None:
            return ()
        return tuple(await asyncio.gather(*(self._teach(turns, sample, self._count) for sample in samples)))

    async def _teach(self, turns: "cycle[_Teacher]", sample: Sample, count: int) -> Teaching:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await next(turns).teach(sample, count)
            except ServiceError as error:
                if attempt == ATTEMPTS:
                    raise RewardFailed(f"no teaching after {attempt} attempts: {error}") from error
                await asyncio.sleep(attempt * RETRY_S)
        raise AssertionError


def _check_vocabulary(student: Path, teacher: Path, pool: str) -> None:
    """The teacher scores the tokens of the student, so they must mean the same to it."""
    sizes = []
    for folder in (student, teacher):
        try:
            sizes.append(msgspec.json.decode((folder / "config.json").read_bytes())["vocab_size"])
        except (OSError, KeyError, msgspec.DecodeError) as error:
            raise ConfigError(f"pools.{pool}.model: {folder} is not a Hugging Face model folder: {error}") from None
    texts = [folder / "tokenizer.json" for folder in (student, teacher)]
    same = all(text.is_file() for text in texts) and _vocabulary(texts[0]) == _vocabulary(texts[1])
    if sizes[0] != sizes[1] or not same:
        raise ConfigError(
            f"pools.{pool}.model: {teacher} has another vocabulary than the policy, whose tokens it scores"
        )


def _vocabulary(path: Path) -> Any:
    return msgspec.json.decode(path.read_bytes()).get("model", {}).get("vocab")
