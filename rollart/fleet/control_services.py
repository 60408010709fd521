"""The services of a run as the control plane sees them when it is recorded or replayed: every call is on the tape.

In a replay there are no real services: what they would have answered is on the tape.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import uvloop
from msgspec import Struct

from rollart.config import RunFile
from rollart.core.action import ParsedAction
from rollart.core.errors import ConfigError
from rollart.core.events import finite
from rollart.core.protocols import ClaimedAgent, ClaimedEnvironment, Generate, Renderer, TokenStream
from rollart.core.teaching import Teaching
from rollart.core.types import (
    Batch,
    CapturedEpisode,
    Completion,
    Episode,
    GenerationRequest,
    Message,
    Publication,
    RewardResult,
    Sample,
    Step,
    StepMetrics,
    Trajectory,
)
from rollart.fleet.control_engines import public
from rollart.fleet.control_tape import FORMAT, ControlTape, Inbound, RecordingLoop, Tape, outside
from rollart.fleet.fleet import Fleet
from rollart.fleet.session import Session
from rollart.players.pool import PlayerPool, player_count
from rollart.rollout.ledger import GroupRecord, Recovery
from rollart.rollout.router import Router

Kind = type[BaseException] | None


async def _published(tape: ControlTape, name: str, work: Callable[[], Awaitable[Publication]]) -> Publication:
    real: list[Publication] = []

    async def publish() -> Publication:
        real.append(await work())
        return public(real[0])

    known = await tape.call(name, Publication, publish)
    return real[0] if real else known


class _TapedClaim:
    """`make` wraps what was claimed."""

    def __init__(
        self, tape: ControlTape, name: str, real: AbstractAsyncContextManager[Any] | None, make: Callable[[Any], Any]
    ) -> None:
        self._tape, self._name, self._real, self._make = tape, name, real, make
        self._claimed: Any = None

    async def __aenter__(self) -> Any:
        await self._tape.call(f"claim {self._name}", None, self._claim)
        return self._make(self._claimed)

    async def _claim(self) -> None:
        assert self._real is not None
        self._claimed = await self._real.__aenter__()

    async def __aexit__(self, kind: Kind, error: BaseException | None, trace: TracebackType | None) -> bool:
        return await self._tape.call(f"release {self._name}", bool, lambda: self._release(kind, error, trace))

    async def _release(self, kind: Kind, error: BaseException | None, trace: TracebackType | None) -> bool:
        assert self._real is not None
        return bool(await self._real.__aexit__(kind, error, trace))


class _TapedEnvironment:
    def __init__(self, tape: ControlTape, task: str, real: ClaimedEnvironment) -> None:
        self._tape, self._task, self._real = tape, task, real

    async def reset(self, seed: int) -> tuple[Message, ...]:
        name = f"{self._task} resets to {seed}"
        return await self._tape.call(name, tuple[Message, ...], lambda: self._real.reset(seed))

    async def step(self, action: str) -> Step:
        return await self._tape.call(f"{self._task} steps with {action}", Step, lambda: self._real.step(action))


class _TapedPool:
    def __init__(self, tape: ControlTape, real: Any) -> None:
        self._tape, self._real = tape, real

    @property
    def in_use(self) -> int:
        count: int = self._tape.value(int, lambda: self._real.in_use)
        return count

    @property
    def capacity(self) -> int:
        count: int = self._tape.value(int, lambda: self._real.capacity)
        return count


class TapedEnvironments(_TapedPool):
    def claim(self, task: str, held_out: bool) -> AbstractAsyncContextManager[ClaimedEnvironment]:
        real = self._real.claim(task, held_out) if self._real is not None else None
        return _TapedClaim(self._tape, task, real, lambda claimed: _TapedEnvironment(self._tape, task, claimed))


class TapedAgents(_TapedPool):
    def claim(self, task: str) -> AbstractAsyncContextManager[ClaimedAgent]:
        real = self._real.claim(task) if self._real is not None else None
        return _TapedClaim(self._tape, task, real, lambda claimed: _TapedAgent(self._tape, claimed))


class _Asked(Struct, frozen=True):
    """A request of an agent; its answer is streamed `every` tokens, if that is not 0."""

    request: GenerationRequest
    every: int = 0


class _TapedAgent:
    def __init__(self, tape: ControlTape, real: ClaimedAgent) -> None:
        self._tape, self._real = tape, real

    async def play(
        self, id: str, seed: int, held_out: bool, generate: Generate, captured: Callable[[CapturedEpisode], None]
    ) -> Step:
        tape = self._tape

        async def answer(asked: tuple[_Asked, TokenStream | None]) -> Completion:
            request, stream = asked[0].request, asked[1]
            if asked[0].every:
                real = stream
                stream = TokenStream(
                    asked[0].every, lambda tokens: tape.value(bool, lambda: real is not None and real.on_tokens(tokens))
                )
            return await generate(request, stream)

        async def play(inbound: Inbound) -> Step:
            async def ask(request: GenerationRequest, stream: TokenStream | None = None, /) -> Completion:
                asked = _Asked(request, stream.every if stream is not None else 0)
                completion: Completion = await inbound.ask("generate", (asked, stream), (asked, None))
                return completion

            return await self._real.play(id, seed, held_out, ask, lambda episode: inbound.notify("captured", episode))

        calls: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "generate": (tuple[_Asked, None], answer),
            "captured": (CapturedEpisode, captured),
        }
        return await tape.serve(f"an agent plays {id}", Step, calls, play)


class TapedRewards:
    def __init__(self, tape: ControlTape, real: Any) -> None:
        self._tape, self._real = tape, real

    async def score(self, task: str, episode: Episode) -> RewardResult:
        return await self._tape.call(f"score {episode.id}", RewardResult, lambda: self._real.score(task, episode))

    async def score_member(self, task: str, episode: Episode, peers: int) -> RewardResult:
        real = self._real
        return await self._tape.call(
            f"score {episode.id}", RewardResult, lambda: real.score_member(task, episode, peers)
        )


class TapedTeachers:
    def __init__(self, tape: ControlTape, real: Any) -> None:
        self._tape, self._real = tape, real

    async def teach(self, task: str, samples: Sequence[Sample]) -> tuple[Teaching, ...]:
        name = f"teach {' '.join(sample.id for sample in samples)}"
        return await self._tape.call(name, tuple[Teaching, ...], lambda: self._real.teach(task, samples))


class TapedRenderer:
    """A tape has what was rendered: a replay needs no tokenizer."""

    def __init__(self, tape: ControlTape, real: Renderer | None, stop: tuple[int, ...]) -> None:
        self._tape, self._real, self.stop = tape, real, stop

    def open(self, messages: Sequence[Message]) -> list[int]:
        return self._tape.value(list[int], lambda: self._there.open(messages))

    def extend(self, last: int, messages: Sequence[Message]) -> list[int]:
        return self._tape.value(list[int], lambda: self._there.extend(last, messages))

    def may_fit(self, messages: Sequence[Message], tokens: int) -> bool:
        return self._tape.value(bool, lambda: self._there.may_fit(messages, tokens))

    def read(self, prompt: Sequence[int], tokens: Sequence[int], opening: Sequence[Message]) -> ParsedAction:
        return self._tape.value(ParsedAction, lambda: self._there.read(prompt, tokens, opening))

    @property
    def _there(self) -> Renderer:
        assert self._real is not None
        return self._real


class TapedTrainer:
    def __init__(self, tape: ControlTape, real: Callable[[], Any]) -> None:
        self._tape, self._real = tape, real

    async def step(self, batch: Batch) -> StepMetrics:
        groups = ", ".join(f"{group.id} ({len(group.samples)})" for group in batch.groups)
        return await self._tape.call(f"train step {batch.step}: {groups}", StepMetrics, lambda: self._step(batch))

    async def _step(self, batch: Batch) -> StepMetrics:
        metrics: StepMetrics = await self._real().step(batch)
        by_task = {task: finite(values) for task, values in metrics.tasks.items()}
        return dataclasses.replace(metrics, values=finite(metrics.values), tasks=by_task)  # JSON has no others

    async def publish(self) -> Publication:
        return await _published(self._tape, "publish", lambda: self._real().publish())

    async def save(self, path: Path) -> None:
        await self._tape.call(f"save {path.name}", None, lambda: self._real().save(path))

    async def saved(self) -> str:
        return await self._tape.call("wait for the checkpoint", str, lambda: self._real().saved())


class TapedLedger:
    """Only what comes back from it is on the tape: what it gets is in the events."""

    def __init__(self, tape: ControlTape, real: Any) -> None:
        self._tape, self._real = tape, real

    def start(self, group: GroupRecord) -> None:
        if self._real is not None:
            outside(lambda: self._real.start(group))

    def add(self, trajectory: Trajectory, *, held_out: bool = False) -> None:
        if self._real is not None:
            outside(lambda: self._real.add(trajectory, held_out=held_out))

    def lease(self, step: int, groups: Iterable[str]) -> None:
        if self._real is not None:
            outside(lambda: self._real.lease(step, groups))

    def drop(self, group: str, reason: str) -> None:
        if self._real is not None:
            outside(lambda: self._real.drop(group, reason))

    def quarantine(self, task: str, times: int) -> None:
        if self._real is not None:
            outside(lambda: self._real.quarantine(task, times))

    def release(self, task: str) -> None:
        if self._real is not None:
            outside(lambda: self._real.release(task))

    def commit(self, version: int) -> None:
        self._tape.value(None, lambda: self._real.commit(version))

    def recover(self) -> Recovery:
        recovery: Recovery = self._tape.value(Recovery, lambda: self._real.recover())
        return recovery


class TapedFleet:
    """A fleet whose every service is on the tape. Without a `real` one, `has` says which services the run had."""

    players: PlayerPool | None = None  # a tape is of one process

    def __init__(
        self, tape: ControlTape, router: Router, real: Fleet | None, *, stop: tuple[int, ...], has: Sequence[str]
    ) -> None:
        self._tape, self._real, self.router = tape, real, router
        self.environments = TapedEnvironments(tape, real and real.environments)
        self.rewards = TapedRewards(tape, real and real.rewards)
        self.renderer = TapedRenderer(tape, real.renderer if real is not None else None, stop)
        self.agents = TapedAgents(tape, real and real.agents) if "agents" in has else None
        self.teachers = TapedTeachers(tape, real and real.teachers) if "teachers" in has else None
        self.trainer = TapedTrainer(tape, lambda: self._there.trainer)

    @property
    def _there(self) -> Fleet:
        assert self._real is not None
        return self._real

    async def supervise(self, trainer: bool = True) -> None:
        await self._tape.call("supervise", None, lambda: self._there.supervise(trainer))

    async def restart_trainer(self, checkpoint: Path | None, version: int) -> Publication:
        name = f"restart the trainer at version {version}"
        return await _published(self._tape, name, lambda: self._there.restart_trainer(checkpoint, version))

    async def export(self, checkpoint: Path, model: Path) -> None:
        await self._tape.call(f"export {checkpoint.name}", None, lambda: self._there.export(checkpoint, model))


class ControlStart(Struct, frozen=True):
    """What a control plane starts with, besides run file and recovery: `priors` of the router, the `stop` tokens of the
    renderer, and which optional services there are."""

    priors: dict[str, float]
    stop: tuple[int, ...]
    has: tuple[str, ...]

    @classmethod
    def of(cls, fleet: Fleet) -> "ControlStart":
        has = tuple(name for name in ("agents", "teachers") if getattr(fleet, name) is not None)
        return cls(fleet.priors, fleet.renderer.stop, has)


class TapeHeader(Struct, frozen=True):
    """The first line of a tape. `run` is the run file as JSON."""

    format: int
    run: str
    recovery: Recovery


def tapes_of(run_dir: Path) -> list[Path]:
    """One for each time that the run was started, in order."""
    return sorted(path for path in (run_dir / "control").glob("*") if path.name.isdigit())


@contextmanager
def recorded(session: Session) -> Iterator[Tape]:
    """A tape of this session, on the loop that runs now. Raises ConfigError if that is not one of `loop_factory`."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, RecordingLoop):
        raise ConfigError(
            "ledger.control needs the event loop of `rollart train`; start the run with it, or set it to false"
        )
    folder = session.directory / "control"
    folder.mkdir(exist_ok=True)
    last = max((int(path.name) for path in tapes_of(session.directory)), default=0)
    with closing(Tape(folder / f"{last + 1:03d}")) as tape:
        header = TapeHeader(FORMAT, session.run.model_dump_json(), session.recovery)
        tape.decide(msgspec.json.encode(header))
        loop.tape = tape
        try:
            yield tape
        finally:
            loop.tape = None


def loop_factory(run: RunFile) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Of the loop that a run needs; None: any. A controller with players mostly reads and writes small messages, which
    uvloop does in half the time."""
    if run.ledger.control:
        return RecordingLoop
    return uvloop.new_event_loop if player_count(run) else None
