"""`summary.json`: the main numbers of a run, for people and scripts; `snapshot.json`: all of them, so that the views of
a run that ended need not read its log again."""

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec

from rollart.core.event_log import log_bytes, read_events
from rollart.core.events import AnyEvent, RunEnded, Warned
from rollart.core.run_folder import events_of, has_controller
from rollart.observe.metrics import Metrics, measure
from rollart.observe.snapshot import Snapshot, failure_ratio, words_of


class _Stored(msgspec.Struct):
    """Of a log of that many bytes."""

    log_bytes: int
    snapshot: Snapshot


def write(directory: Path, shot: Snapshot) -> dict[str, Any]:
    """Write both files into the run folder, atomically. The event log must be closed."""
    summary = summarise(shot) | {"directory": str(directory)}
    stored = msgspec.json.encode(_Stored(log_bytes(directory / "events"), shot))
    for name, content in (("summary.json", json.dumps(summary, indent=2).encode() + b"\n"), ("snapshot.json", stored)):
        new = directory / f"{name}.new"
        new.write_bytes(content)
        new.replace(directory / name)
    return summary


def snapshot_of(directory: Path) -> Snapshot:
    """The run so far: as stored if it ended, else folded from its log. Raises RollartError if there is no run."""
    log = events_of(directory)
    with contextlib.suppress(OSError, msgspec.MsgspecError):  # it goes on, was killed, or is from another version
        stored = msgspec.json.decode((directory / "snapshot.json").read_bytes(), type=_Stored)
        if stored.log_bytes == log_bytes(log):
            return stored.snapshot
    gone = has_controller(directory) is False  # before the log is read: it may be about to end
    return measure(read_events(log), (lambda metrics: unwritten_end(metrics, directory)) if gone else None)


def unwritten_end(metrics: Metrics, directory: Path) -> list[AnyEvent]:
    """The end of a run whose controller is gone, if its log has none: it was killed before it could write one."""
    run = metrics.run
    if run is None or metrics.ended:
        return []
    words = words_of(run.work)
    command = f"rollart {words.command or run.work} {directory}/run.yaml --resume --run-dir {directory}"
    how = f"continue with: {command}" if words.resumes else f"start it again: rollart {run.work}"
    message = f"the controller was killed, or its machine went down; {how}"
    return [
        Warned(message=message, t=metrics.t),
        RunEnded(version=metrics.version, reason="interrupted", t=metrics.t),
    ]


def summarise(shot: Snapshot) -> dict[str, Any]:
    """The numbers that are kept, as plain values."""
    tasks = {}
    for task in shot.tasks:
        before, after = task.before, task.now
        tasks[task.name] = {
            "before": before.success if before else None,
            "after": after.success if after else None,
            "failure_ratio": failure_ratio(task),
            "episodes": after.episodes if after else 0,
            "unplayed": after.failed if after else 0,
            "held_out": [[point.version, round(point.t, 3), point.success] for point in task.held_out],
            "reward": task.reward,
            "outcomes": task.outcomes,
            "seconds_by_stage": task.stages,
            **({"agent": task.agent} if task.agent else {}),
            **({"out": task.out} if task.out else {}),
        }
    plain: dict[str, Any] = _tidy(
        msgspec.to_builtins(
            {
                "name": shot.name,
                "preset": shot.preset,
                "alpha": shot.alpha,
                "seed": shot.seed,
                "phase": shot.phase,
                "version": shot.step,
                "steps": shot.steps,
                "resumes": shot.resumes,
                "seconds": shot.t,
                "rl_seconds": shot.rl_s,
                "tasks": tasks,
                "trained_trajectories": shot.trained,
                **{name: value.overall for name, value in shot.metrics.items()},
                "utilisation": shot.use,
                "trainer_waited_s": shot.waited_s,
                "staleness": {str(age): count for age, count in shot.staleness.items()},
                "drops": shot.drops,
                "routes": shot.routes,
                "places": shot.places,
                "emulated": shot.emulated,
                "environments": shot.environments,
                "rewards": shot.rewards,
            }
        )
    )
    return plain


def _tidy(value: Any) -> Any:
    """Round to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _tidy(inner) for key, inner in value.items()}
    return [_tidy(inner) for inner in value] if isinstance(value, list | tuple) else value
