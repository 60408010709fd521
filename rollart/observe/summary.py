"""`summary.json`: the main numbers of a run, for people and scripts."""

import json
from pathlib import Path
from typing import Any

import msgspec

from rollart.core.event_log import read_events
from rollart.observe.metrics import measure
from rollart.observe.snapshot import Snapshot, failure_ratio


def write(directory: Path) -> dict[str, Any]:
    """Summarise the event log in `directory` and write `summary.json` next to it, atomically."""
    summary = summarise(measure(read_events(directory / "events.jsonl"))) | {"directory": str(directory)}
    new = directory / "summary.json.new"
    new.write_text(json.dumps(summary, indent=2) + "\n")
    new.replace(directory / "summary.json")
    return summary


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
