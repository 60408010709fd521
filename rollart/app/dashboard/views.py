"""The JSON of each view of one run, from its index. Callers are inside `whole_events` of it."""

from collections.abc import Callable
from typing import Any

import msgspec

from rollart.app.dashboard import videos
from rollart.app.dashboard.pace import pace
from rollart.app.dashboard.run_index import RunIndex
from rollart.app.dashboard.step_curves import thin
from rollart.observe.snapshot import Snapshot, TaskSnapshot, failure_ratio

Json = dict[str, Any]


def overview(index: RunIndex, query: dict[str, str]) -> Json:
    metrics = index.shown
    shot = metrics.snapshot()
    rewards = index.curves.rewards()
    return {
        **_head(index, shot),
        "eta_s": shot.eta_s,
        "warmup": shot.warmup,
        "losses": thin(list(index.curves.losses.items())),
        "rates": {name: [value.recent, value.overall] for name, value in shot.metrics.items()},
        "trained": shot.trained,
        "tokens": sum(step.tokens for step in shot.history),
        "tasks": [_task(task, rewards.get(task.name, [])) for task in shot.tasks],
        "pace": pace(shot),
        "use": msgspec.to_builtins(shot.recent_use if not metrics.ended else shot.use),
        "steps_s": [[step.version, step.seconds, step.waited_s, step.t] for step in thin(list(shot.history))],
        "feed": list(index.feed.notices)[::-1] or [{"t": shot.t, "level": "warn", "text": w} for w in shot.warnings],
        "lost_environments": index.feed.lost_environments,
        "drops": shot.drops,
        "videos": videos.listed(index.folder),
    }


def _head(index: RunIndex, shot: Snapshot) -> Json:
    started = index.shown.run
    about = msgspec.to_builtins(started) if started else {}
    return {
        "run": index.name,
        "about": about,
        "phase": shot.phase,
        "step": shot.step,
        "steps": shot.steps,
        "t": shot.t,
        "alpha": shot.alpha,
        "preset": shot.preset,
        "resumes": shot.resumes,
        "emulated": shot.emulated,
        "state": index.state(),
    }


def _task(task: TaskSnapshot, points: list[Json]) -> Json:
    return {
        "name": task.name,
        "reward": task.reward,
        "success": task.success,
        "turns": task.turns,
        "tokens": task.tokens,
        "seconds": task.seconds,
        "before": msgspec.to_builtins(task.before) if task.before else None,
        "now": msgspec.to_builtins(task.now) if task.now else None,
        "failure_ratio": failure_ratio(task),
        "held_out": [msgspec.to_builtins(point) for point in task.held_out],
        "points": points,
        "outcomes": task.outcomes,
        "stages": task.stages,
    }


def now(index: RunIndex, query: dict[str, str]) -> Json:
    machines, last = index.machines, index.machines.pipeline[-1] if index.machines.pipeline else None
    change = query.get("since", "0")
    return {
        "t": index.metrics.t,
        "state": index.state(),
        "lanes": index.lanes.since(int(change) if change.isdigit() else 0),
        "counts": index.lanes.counts(),
        "engines": machines.engine_rows(),
        "pipeline": msgspec.to_builtins(last) if last else None,
        "gateway": msgspec.to_builtins(machines.gateway) if machines.gateway else None,
        "hosts": [msgspec.to_builtins(host) for host in machines.hosts.values()],
    }


def trajectories(index: RunIndex, query: dict[str, str]) -> Json:
    offset, limit = (query.get(name, "") for name in ("offset", "limit"))
    start, size = int(offset) if offset.isdigit() else 0, int(limit) if limit.isdigit() else 50
    return {"state": index.state(), **index.table.page(query, start, min(500, size))}


def time(index: RunIndex, query: dict[str, str]) -> Json:
    end = max(index.metrics.t, 1e-3)
    low, high = _seconds(query.get("from"), 0.0), _seconds(query.get("to"), end)
    pixels = int(_seconds(query.get("pixels"), 1200))
    window = index.time.window(low, max(high, low + 1e-4), max(64, min(4096, pixels)))
    return {"state": index.state(), "end": end, "notices": list(index.feed.notices), **window}


def _seconds(text: str | None, default: float) -> float:
    try:
        value = float(text) if text else default
    except ValueError:
        return default
    return value if value == value and abs(value) < 1e12 else default


def freshness(index: RunIndex, query: dict[str, str]) -> Json:
    shot = index.shown.snapshot()
    steps = thin(list(shot.history))
    return {
        **_head(index, shot),
        "staleness": shot.staleness,
        "by_step": [[step.version, step.mean_staleness, max(step.staleness, default=0)] for step in steps],
        "values": [{"version": step.version, **step.values} for step in steps],
        "tasks": thin(index.curves.trained),
        "gaps": [
            {"version": step.version, "task": gap.task, "age": gap.age, "mean": gap.mean, "max": gap.max}
            for step in steps
            for gap in step.gaps
        ],
        "wasted": [
            {"cause": cause, "trajectories": n, "tokens": tokens}
            for cause, (n, tokens) in sorted(index.curves.wasted.items(), key=lambda row: -row[1][1])
        ],
        "trained_tokens": sum(step.tokens for step in shot.history),
    }


def hardware(index: RunIndex, query: dict[str, str]) -> Json:
    shot, machines = index.shown.snapshot(), index.machines
    per_hour = index.shown.run.price if index.shown.run else 0.0
    steps = shot.history[-20:]
    step_s = (steps[-1].t - steps[0].t) / (len(steps) - 1) if len(steps) > 1 else None
    return {
        **_head(index, shot),
        "places": [msgspec.to_builtins(place) for place in shot.places],
        "services": [msgspec.to_builtins(service) for service in machines.services.values()],
        "engines": machines.engine_rows(),
        "use": msgspec.to_builtins(shot.use),
        "recent_use": msgspec.to_builtins(shot.recent_use),
        "pace": pace(shot),
        "routes": [msgspec.to_builtins(route) for route in shot.routes],
        "swaps": [msgspec.to_builtins(swap) for swap in shot.swaps],
        "fan_out": machines.fan_out({place.name: place.node for place in shot.places}),
        "swapping": len(machines.swaps),
        "rewards": [msgspec.to_builtins(reward) for reward in shot.rewards],
        "environments": [msgspec.to_builtins(one) for one in shot.environments],
        "hosts": [msgspec.to_builtins(host) for host in machines.hosts.values()],
        "price_per_hour": per_hour,
        "cost_per_step": None if step_s is None else per_hour * step_s / 3600,
    }


def compared(index: RunIndex, query: dict[str, str]) -> Json:
    """What the comparison of runs needs of each."""
    shot = index.shown.snapshot()
    tokens, points = 0, []
    for step in shot.history:
        tokens += step.tokens
        row = {"version": step.version, "t": step.t, "tokens": tokens, "seconds": step.seconds, **step.values}
        points.append(row | {"rewards": step.rewards, "staleness": step.mean_staleness, "waited_s": step.waited_s})
    return {
        **_head(index, shot),
        "price_per_hour": index.shown.run.price if index.shown.run else 0.0,
        "points": thin(points),
        "held_out": {task.name: [msgspec.to_builtins(point) for point in task.held_out] for task in shot.tasks},
    }


VIEWS: dict[str, Callable[[RunIndex, dict[str, str]], Json]] = {
    "overview": overview,
    "now": now,
    "trajectories": trajectories,
    "time": time,
    "freshness": freshness,
    "hardware": hardware,
    "compare": compared,
}
PUSHED = ("overview", "now", "freshness", "hardware")


class PushedView:
    """What one page sees of a view, and what changed in it since the last time: only the keys whose values differ, and
    only the trajectories that moved."""

    def __init__(self, index: RunIndex, name: str) -> None:
        self._index, self._view = index, VIEWS[name]
        self._sent: dict[str, int] = {}  # hashes
        self._since = 0

    def changes(self) -> bytes:
        """A JSON object."""
        with self._index.whole_events():
            found = self._view(self._index, {"since": str(self._since)})
        self._since = found.get("lanes", {}).get("change", 0)
        changed = {}
        for key, value in found.items():
            encoded = msgspec.json.encode(value)
            if key != "state" and self._sent.get(key) != hash(encoded):
                self._sent[key], changed[key] = hash(encoded), msgspec.Raw(encoded)
        return msgspec.json.encode(changed)
