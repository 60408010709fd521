"""Runs the control plane of a recorded run again, on virtual time, and compares every decision.

Scheduler, router, batcher and training loop are those of the run; services, clock and event loop are the tape. Nothing
is generated, trained or rendered again, so a tape is all that a replay needs.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from rollart.config import RunFile
from rollart.core.errors import RollartError
from rollart.core.event_log import EventReader, exists
from rollart.fleet.checkpoints import Checkpoints
from rollart.fleet.control_engines import TapedEngine, inbound_calls
from rollart.fleet.control_playback import Playback, PlayingLoop
from rollart.fleet.control_services import ControlStart, TapedFleet, TapedLedger, TapeHeader, tapes_of
from rollart.fleet.control_tape import FORMAT, outside
from rollart.fleet.controller import Training
from rollart.fleet.fleet import make_router
from rollart.rollout.engine_registry import EngineRegistry


@dataclass(frozen=True, slots=True)
class ControlResult:
    """The tapes of a run, one for each time it was started. `difference` is a sentence that names the first decision
    that differs."""

    sessions: int
    decisions: int
    difference: str = ""

    @property
    def identical(self) -> bool:
        return not self.difference and self.decisions > 0


def replay_control(run_dir: Path) -> ControlResult:
    """Every tape of a run, in order, up to the first difference. Raises RollartError."""
    tapes = tapes_of(run_dir)
    if not tapes:
        raise RollartError(
            f"{run_dir} has no tape of its control plane; record one with `--set ledger.control=true` when you train"
        )
    decisions = 0
    for number, tape in enumerate(tapes, 1):
        playback = play(tape)
        decisions += playback.compared
        if playback.difference:
            where = f"start {number} of {len(tapes)}, " if len(tapes) > 1 else ""
            return ControlResult(number, decisions, where + playback.difference)
    return ControlResult(len(tapes), decisions)


def play(tape: Path) -> Playback:
    """One tape. Raises RollartError if it is not one of this version of rollart."""
    if not exists(tape):
        raise RollartError(f"{tape} is not a tape of a control plane")
    lines = EventReader(tape).lines()
    try:
        header = msgspec.json.decode(next(lines, b""), type=TapeHeader)
    except msgspec.DecodeError as error:
        raise RollartError(f"{tape} cannot be replayed by this version of rollart: {error}") from error
    if header.format != FORMAT:
        raise RollartError(f"{tape} has format {header.format}, and this version of rollart replays format {FORMAT}")
    playback = Playback(lines)
    with TemporaryDirectory(prefix="rollart-control-") as scratch:
        inbound: dict[str, Any] = {}
        loop = PlayingLoop(playback, inbound)
        asyncio.set_event_loop(loop)
        try:
            inbound |= _control_plane(header, playback, Path(scratch), loop)
            loop.play()
        finally:
            asyncio.set_event_loop(None)
            loop.close()
    return playback


def _control_plane(header: TapeHeader, tape: Playback, scratch: Path, loop: PlayingLoop) -> dict[str, Any]:
    """The calls that start, feed and stop a control plane."""
    run = RunFile.model_validate_json(header.run)
    registry = EngineRegistry(version=header.recovery.version, sink=tape)
    tasks: list[asyncio.Task[None]] = []

    def start(with_: ControlStart) -> None:
        router = make_router(run, registry, with_.priors)
        fleet = TapedFleet(tape, router, None, stop=with_.stop, has=with_.has)
        checkpoints = Checkpoints(scratch, run.checkpoint.keep, best=run.checkpoint.best)
        training = Training(run, fleet, TapedLedger(tape, None), tape, checkpoints)
        task = loop.create_task(training.run_all(header.recovery, scratch / "model"))
        outside(lambda: task.add_done_callback(lambda done: done.cancelled() or done.exception()))
        tasks.append(task)

    return inbound_calls(registry, lambda name, url: TapedEngine(tape, name, None, url)) | {
        "start": ((ControlStart,), start),
        "stop": ((), lambda: tasks[0].cancel()),
    }
