"""What sets the pace of a run: where the trainer's time goes, and what it waits for."""

from collections.abc import Mapping
from typing import Any

from rollart.observe.snapshot import Snapshot

_LAST = 20
CAUSES = {
    "queue": ("engines are full", "requests wait in the queues of the engines: add engines, or raise max_batch"),
    "generate": ("generation", "engines are busy with tokens: add engines, or faster ones"),
    "claim": ("environments are all in use", "trajectories wait for an environment: raise environments.processes"),
    "reset": ("resets are slow", "environments take long to start"),
    "step": ("environments are slow", "environments take long to answer"),
    "score": ("rewards are slow", "trajectories wait for their reward"),
    "other": ("other", "between the stages"),
}


def pace(shot: Snapshot) -> dict[str, Any]:
    """Shares of the time of the last steps, and a sentence."""
    steps = shot.history[-_LAST:]
    if len(steps) < 2:
        return {"parts": [], "causes": [], "text": "known after two steps", "steps": len(steps)}
    span = max(1e-9, steps[-1].t - steps[0].t)
    trained = sum(step.seconds for step in steps[1:])
    waited = sum(step.waited_s for step in steps[1:])
    rest = max(0.0, span - trained - waited)
    parts = [
        {"name": "training", "share": min(1.0, trained / span)},
        {"name": "waiting for a batch", "share": min(1.0, waited / span)},
        {"name": "publishing and other", "share": min(1.0, rest / span)},
    ]
    causes = _causes([task.stages for task in shot.tasks])
    return {"parts": parts, "causes": causes, "text": _sentence(parts, causes), "steps": len(steps)}


def _causes(tasks: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Where trajectories spent their time, the longest first."""
    totals = {stage: sum(stages.get(stage, 0.0) for stages in tasks) for stage in CAUSES}
    whole = sum(totals.values())
    if whole <= 0:
        return []
    rows = [
        {"stage": stage, "name": CAUSES[stage][0], "hint": CAUSES[stage][1], "share": seconds / whole}
        for stage, seconds in totals.items()
    ]
    return sorted(rows, key=lambda row: -float(row["share"]))


def _sentence(parts: list[dict[str, Any]], causes: list[dict[str, Any]]) -> str:
    most = max(parts, key=lambda part: float(part["share"]))
    if most["name"] == "training":
        return f"The trainer sets the pace: it is busy {most['share']:.0%} of the time."
    if most["name"] == "waiting for a batch" and causes:
        cause: Mapping[str, Any] = causes[0]
        return (
            f"The trainer waits for a batch {most['share']:.0%} of the time. Trajectories spend {cause['share']:.0%} "
            f"of theirs in one stage: {cause['name']}; {cause['hint']}."
        )
    return f"{most['name'].capitalize()} takes {most['share']:.0%} of the time."
