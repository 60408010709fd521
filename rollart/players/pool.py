"""The player processes of a run, as the scheduler sees them: `run` plays an attempt in one of them.

Invariants: attempts at one episode are played by one player, so that rewards can compare them and their opening is
tokenized once; otherwise the player with the least to do gets an attempt. Every attempt ends in one outcome: if its
player ends, it is `engine_failed`, which counts against no task, and is replaced. A player that ends is restarted; one
that keeps ending soon after its start is given up, and the run ends when none is left.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rollart.config import RunFile
from rollart.core.errors import ServiceError
from rollart.core.events import EventSink, ServiceEnded, TrajectoryEnded, TrajectoryStarted, Warned
from rollart.core.types import Outcome, Trajectory
from rollart.launch.launcher import Launcher, ResourceRequest, ServiceHandle, service_command, service_started
from rollart.launch.local import LocalLauncher
from rollart.placement.bindings import Binding
from rollart.players.desk import RoutingDesk
from rollart.players.link import Link
from rollart.players.messages import AttemptCancelled, AttemptToPlay, Played
from rollart.rollout.router import Router
from rollart.rollout.trajectory import Attempt, TrajectoryRunner

SILENT_S = 30.0  # a player reports every few seconds
CANCEL_S = 60.0  # for an attempt to end after it was cancelled
ENVIRONMENTS_EACH = 256
SETTLED_S, MAX_SHORT_LIVES, BACKOFF_S = 60.0, 3, 1.0
# Pieces of memory of one size that the C library keeps at hand: a tokenizer takes and returns hundreds at a time, and
# by default there are seven; a text costs a fifth to a third less CPU. Huge pages, where the kernel has them for who
# asks, because words are looked up all over a vocabulary of megabytes.
_ALLOCATOR = "glibc.malloc.tcache_count=2000:glibc.malloc.hugetlb=1"


def played_tasks(run: RunFile) -> frozenset[str]:
    """The tasks that players can play: agents send requests to the controller, and teachers are connected to it."""
    return frozenset(task.name for task in run.tasks if task.agent is None and run.teacher_of(task) is None)


def player_count(run: RunFile) -> int:
    """As the run file says. `auto`: one for `ENVIRONMENTS_EACH`, on half of the cores at most, and none for a run that
    the controller can serve alone, or that needs all trajectories in one process."""
    tasks, asked = played_tasks(run), run.rollout.players
    if not tasks:
        return 0
    if asked != "auto":
        return asked
    if run.rollout.schedule().lockstep or run.ledger.control:
        return 0
    wanted = min(run.environments.processes * len(tasks) // ENVIRONMENTS_EACH, (os.cpu_count() or 1) // 2)
    return wanted if wanted > 1 else 0


class _PlayerProcess:
    """One process, from start to end; `attempts` are what it plays, with the futures of their results."""

    def __init__(self, router: Router, sink: EventSink, on_bug: Callable[[BaseException], None]) -> None:
        self.attempts: dict[str, tuple[Attempt, asyncio.Future[Played]]] = {}
        self.desk = RoutingDesk(router, sink, self.attempts, send=lambda reply: self.link.send(reply), on_bug=on_bug)
        self.link = Link(self.desk.receive, self.lose)
        self.stack = AsyncExitStack()
        self.since = asyncio.get_running_loop().time()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.handle: ServiceHandle

    @property
    def alive(self) -> bool:
        return not self.lost.done()

    async def start(self, launcher: Launcher, setup: "PlayerSetup", name: str) -> None:
        """Raises ServiceError."""
        folder = Path(tempfile.mkdtemp(prefix="rollart-player-"))
        self.stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            spec = setup.spec() | {"name": name, "socket": str(folder / "socket")}
            command = service_command("rollart.players.service", spec, name=name, logs=setup.logs)
            tunables = ":".join(filter(None, [_ALLOCATOR, os.environ.get("GLIBC_TUNABLES")]))  # the user's count
            command = replace(command, environment={**command.environment, "GLIBC_TUNABLES": tunables})
            self.handle = await launcher.launch(command, ResourceRequest())
            self.stack.push_async_callback(self.handle.stop)
            await asyncio.get_running_loop().create_unix_connection(lambda: self.link, spec["socket"])
        except BaseException as error:
            await self.stack.aclose()
            if isinstance(error, OSError):
                raise ServiceError(f"{name} cannot be reached: {error}") from error
            raise
        self.stack.callback(self.desk.close)
        self.stack.callback(self.link.close)

    def lose(self, reason: str) -> None:
        """It has ended, or is given up: all that it plays is lost."""
        if self.lost.done():
            return
        self.lost.set_result(reason)
        self.link.close()
        self.desk.close()
        for _, result in self.attempts.values():
            if not result.done():
                result.set_exception(ServiceError(reason))

    async def ended(self) -> str:
        """Wait until it ended, or does not answer any more; returns why."""
        ending = asyncio.ensure_future(self.handle.wait())
        try:
            while not ending.done() and self.alive:
                await asyncio.wait([ending, self.lost], timeout=SILENT_S, return_when=asyncio.FIRST_COMPLETED)
                if asyncio.get_running_loop().time() - self.link.received_at > SILENT_S:
                    self.lose(f"it has sent nothing for {SILENT_S:g} s")
            if not ending.done():
                self.handle.kill()
            reason = await ending
            self.lose(reason)
            return reason if reason and self.lost.result().startswith("the connection") else self.lost.result()
        finally:
            ending.cancel()


@dataclass(slots=True)
class _Episode:
    """The player of the attempts at one episode, while there are any."""

    player: str
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class PlayerSetup:
    """What `count` players are started with; `bindings` are those of environments."""

    run: RunFile
    count: int
    model: Path
    logs: Path
    bindings: Sequence[Binding] = ()

    def spec(self) -> dict[str, Any]:
        return {
            "run": self.run.model_dump(mode="json"),
            "players": self.count,
            "model": str(self.model),
            "logs": str(self.logs),
            "bindings": msgspec.to_builtins(self.bindings),
            "path": sys.path,
        }


class PlayerPool:
    """Players run on the machine of the controller, wherever `launcher` starts other services."""

    def __init__(self, setup: PlayerSetup, *, launcher: Launcher, router: Router, sink: EventSink) -> None:
        self._setup, self._router, self._sink = setup, router, sink
        self._launcher = launcher if launcher.here else LocalLauncher()
        self._own_launcher = self._launcher is not launcher
        self._players: dict[str, _PlayerProcess] = {}
        self._episodes: dict[tuple[str, int], _Episode] = {}
        self._back = asyncio.Event()
        self._failed: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

    @property
    def in_use(self) -> int:
        """Environments."""
        return sum(player.desk.in_use for player in self._players.values())

    @property
    def capacity(self) -> int:
        """Environments at the same time."""
        return self._setup.run.environments.processes * len(played_tasks(self._setup.run))

    @property
    def pids(self) -> dict[str, int]:
        return {name: player.handle.pid for name, player in self._players.items()}

    async def start(self) -> None:
        """Raises ServiceError."""
        results = await asyncio.gather(
            *(self._start(f"player-{number}") for number in range(self._setup.count)), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _start(self, name: str) -> None:
        began = asyncio.get_running_loop().time()
        player = _PlayerProcess(self._router, self._sink, self._fail)
        await player.start(self._launcher, self._setup, name)
        self._players[name] = player
        seconds = asyncio.get_running_loop().time() - began
        self._sink.emit(service_started("player", name, player.handle, seconds))
        self._back.set()

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    async def close(self) -> None:
        await asyncio.gather(*(player.stack.aclose() for player in self._players.values()))
        self._players.clear()
        if self._own_launcher:
            await self._launcher.close()
        self._failed.cancel()

    # While the run goes on

    async def watch(self) -> NoReturn:
        """Restarts players. Raises ServiceError when none is left, and whatever a bug of ours raised."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wait_for_failure())
            for number in range(self._setup.count):
                group.create_task(self._keep(f"player-{number}"))
        raise AssertionError("unreachable")

    async def _wait_for_failure(self) -> None:
        await asyncio.shield(self._failed)

    async def _keep(self, name: str) -> None:
        short_lives = 0
        while True:
            player = self._players.get(name)
            if player is not None:
                reason = await player.ended()
                del self._players[name]
                self._sink.emit(ServiceEnded(role="player", name=name, reason=reason))
                await player.stack.aclose()
                lived = asyncio.get_running_loop().time() - player.since
                short_lives = 0 if lived > SETTLED_S else short_lives + 1
            if short_lives > MAX_SHORT_LIVES:
                self._give_up(name, reason)
                return
            try:
                await self._start(name)
            except ServiceError as error:
                reason, short_lives = str(error), short_lives + 1
                self._sink.emit(Warned(message=f"{name} is not back yet: {error}"))
                await asyncio.sleep(BACKOFF_S * 2**short_lives)

    def _give_up(self, name: str, reason: str) -> None:
        if not self._players:
            raise ServiceError(f"no player is left; {name} kept ending soon after its start, the last time: {reason}")
        self._sink.emit(Warned(message=f"the run goes on without {name}, which kept ending: {reason}"))

    # Attempts

    async def run(self, attempt: Attempt) -> Trajectory:
        """Raises only for bugs: whatever happens to the attempt is in the outcome, cancellation included."""
        attempt.coroutine = asyncio.current_task()
        key = (attempt.group, attempt.seed)
        began = asyncio.get_running_loop().time()
        try:
            name, player = await self._pick(key, attempt)
        except asyncio.CancelledError:
            return self._unplayed(attempt, began, attempt.verdict or Outcome.CANCELLED, attempt.reason)
        episode = self._episodes.setdefault(key, _Episode(name))
        episode.player, episode.attempts = name, episode.attempts + 1
        try:
            played = await self._play(player, attempt)
        except ServiceError as error:
            started = attempt.id in player.desk.started
            return self._unplayed(attempt, began, Outcome.ENGINE_FAILED, f"{name} was lost: {error}", started)
        finally:
            player.attempts.pop(attempt.id, None)
            player.desk.started.discard(attempt.id)
            episode.attempts -= 1
            if not episode.attempts:
                self._episodes.pop(key, None)
        self._sink.emit(played.ended)
        return played.trajectory

    async def _pick(self, key: tuple[str, int], attempt: Attempt) -> tuple[str, _PlayerProcess]:
        """Waits while no player is there, which `watch` ends if it lasts."""
        if attempt.verdict is not None:
            raise asyncio.CancelledError  # cancelled before it could start
        while not (alive := {name: each for name, each in self._players.items() if each.alive}):
            self._back.clear()
            await self._back.wait()
        known = self._episodes.get(key)
        if known is not None and known.player in alive:
            return known.player, alive[known.player]
        return min(alive.items(), key=lambda item: len(item[1].attempts))

    async def _play(self, player: _PlayerProcess, attempt: Attempt) -> Played:
        result: asyncio.Future[Played] = asyncio.get_running_loop().create_future()
        player.attempts[attempt.id] = attempt, result
        player.link.send(
            AttemptToPlay(
                id=attempt.id,
                task=replace(attempt.task, plan=None, band=None, rule=None),
                group=attempt.group,
                member=attempt.member,
                seed=attempt.seed,
                version=attempt.version,
                held_out=attempt.held_out,
                peers=attempt.peers,
            )
        )
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            verdict = attempt.verdict or Outcome.CANCELLED
            player.link.send(AttemptCancelled(attempt.id, verdict, attempt.reason))
        try:
            return await asyncio.wait_for(result, CANCEL_S)
        except TimeoutError:
            player.lose(f"an attempt did not end within {CANCEL_S:g} s after it was cancelled")
            raise ServiceError("it did not end a cancelled attempt") from None

    def _unplayed(
        self, attempt: Attempt, began: float, outcome: Outcome, reason: str, started: bool = False
    ) -> Trajectory:
        """The trajectory of an attempt whose player has no result, and its events."""
        task = attempt.task.name
        if not started:
            self._sink.emit(
                TrajectoryStarted(
                    trajectory=attempt.id,
                    task=task,
                    group=attempt.group,
                    version=attempt.version,
                    held_out=attempt.held_out,
                )
            )
        seconds = asyncio.get_running_loop().time() - began
        self._sink.emit(
            TrajectoryEnded(
                trajectory=attempt.id,
                task=task,
                group=attempt.group,
                outcome=outcome,
                turns=0,
                tokens=0,
                seconds=seconds,
                reward=None,
                success=None,
                reason=reason,
                held_out=attempt.held_out,
                action_tokens=0,
            )
        )
        return Trajectory(
            id=attempt.id,
            task=task,
            group=attempt.group,
            member=attempt.member,
            seed=attempt.seed,
            outcome=outcome,
            reason=reason,
            temperature=attempt.task.sampling.temperature,
            started_s=began,
            seconds=seconds,
        )


@dataclass(frozen=True, slots=True)
class SharedRunner:
    """Plays attempts of the `tasks` in players, and others here. Implements `rollout.evaluation.EpisodeRunner`."""

    players: PlayerPool
    here: TrajectoryRunner
    tasks: frozenset[str] = field(default_factory=frozenset)

    async def run(self, attempt: Attempt) -> Trajectory:
        return await (self.players if attempt.task.name in self.tasks else self.here).run(attempt)
