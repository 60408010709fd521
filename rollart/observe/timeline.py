"""The event log as a Chrome trace, for Perfetto or chrome://tracing.

Trajectories are packed into lanes: one takes the first lane of its task that is free and releases it when it ends, so
there are only as many lanes as there were trajectories at once. Within a track, slices nest or follow, never cross.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollart.core import events as ev

Record = dict[str, Any]

_CONTROL, _ENGINES, _FIRST_TASK = 1, 2, 10


def _us(t: float) -> int:
    return max(0, round(t * 1e6))


@dataclass(slots=True)
class Track:
    """Slices one after the other; one that would begin before the last ended is shortened."""

    pid: int
    tid: int
    free: int = 0

    def slice(self, name: str, start: float, end: float, **args: object) -> Record:
        begin = max(_us(start), self.free)
        self.free = max(_us(end), begin)
        return _slice(pid=self.pid, tid=self.tid, name=name, begin=begin, end=self.free, args=args)


@dataclass(slots=True)
class Lanes:
    """The tracks of one task. The lowest free lane is used first."""

    pid: int
    free: list[int] = field(default_factory=list)
    made: int = 0

    def take(self) -> int:
        if self.free:
            return heapq.heappop(self.free)
        self.made += 1
        return self.made

    def release(self, lane: int) -> None:
        heapq.heappush(self.free, lane)


@dataclass(slots=True)
class Open:
    """A trajectory that has not ended yet."""

    lanes: Lanes
    track: Track
    started: ev.TrajectoryStarted
    inner: list[Record] = field(default_factory=list)


def _slice(pid: int, tid: int, name: str, begin: int, end: int, args: dict[str, object]) -> Record:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": begin, "dur": end - begin, "args": args}


class Timeline:
    """Feed it the events in order; `records` yields what each one adds to the trace."""

    def __init__(self) -> None:
        self._tasks: dict[str, Lanes] = {}
        self._tracks: dict[tuple[int, str], Track] = {}
        self._open: dict[str, Open] = {}
        self._warming: float | None = None
        self._engines = "engines"

    def records(self, event: ev.AnyEvent) -> Iterator[Record]:
        match event:
            case ev.RunStarted(emulated=emulated) if emulated:
                self._engines = f"engines (EMULATED: {', '.join(emulated)})"
            case ev.TrajectoryStarted():
                yield from self._begin(event)
            case ev.EnvironmentReset() | ev.TurnDone() | ev.Scored():
                self._inside(event)
            case ev.TrajectoryEnded():
                yield from self._end(event.trajectory, event.t, msgspec.to_builtins(event))
            case ev.EngineSample() | ev.PipelineSample():
                yield from self._count(event)
            case _:
                yield from self._machinery(event)

    def close(self, t: float) -> Iterator[Record]:
        """What was still running at `t`: the run was killed or stopped there."""
        for name in list(self._open):
            yield from self._end(name, t, {"outcome": "lost"})

    def _lanes(self, task: str) -> tuple[Lanes, list[Record]]:
        if task in self._tasks:
            return self._tasks[task], []
        lanes = self._tasks[task] = Lanes(_FIRST_TASK + len(self._tasks))
        return lanes, [_name("process_name", lanes.pid, 0, task)]

    def _track(self, pid: int, name: str) -> tuple[Track, list[Record]]:
        if (pid, name) in self._tracks:
            return self._tracks[pid, name], []
        known = sum(other == pid for other, _ in self._tracks)
        track = self._tracks[pid, name] = Track(pid, known + 1)
        process = {_CONTROL: "trainer", _ENGINES: self._engines}[pid]
        return track, [_name("process_name", pid, 0, process), _name("thread_name", pid, track.tid, name)]

    def _begin(self, event: ev.TrajectoryStarted) -> Iterator[Record]:
        lanes, new = self._lanes(f"{event.task} (held out)" if event.held_out else event.task)
        yield from new
        before = lanes.made
        track = Track(lanes.pid, lanes.take(), _us(event.t))
        if lanes.made > before:
            yield _name("thread_name", lanes.pid, track.tid, f"lane {track.tid}")
        self._open[event.trajectory] = Open(lanes, track, event)

    def _inside(self, event: ev.EnvironmentReset | ev.TurnDone | ev.Scored) -> None:
        trajectory = self._open.get(event.trajectory)
        if trajectory is None:
            return
        track, inner = trajectory.track, trajectory.inner
        match event:
            case ev.EnvironmentReset():
                began = event.t - event.seconds
                if _us(began) > track.free:
                    inner.append(track.slice("wait for an environment", trajectory.started.t, began))
                inner.append(track.slice("reset", began, event.t))
            case ev.Scored():
                inner.append(track.slice("score", event.t - event.seconds, event.t))
            case ev.TurnDone():
                acted = event.t - event.env_s
                args = {
                    key: getattr(event, key)
                    for key in ("turn", "engine", "version", "prompt", "cached", "tokens", "queue_s")
                }
                inner.append(track.slice("generate", acted - event.generate_s, acted, **args))
                inner.append(track.slice("env step", acted, event.t, turn=event.turn))

    def _end(self, name: str, t: float, args: dict[str, object]) -> Iterator[Record]:
        trajectory = self._open.pop(name, None)
        if trajectory is None:
            return
        track, began = trajectory.track, _us(trajectory.started.t)
        end = max(_us(t), track.free)
        label = f"{name} {args['outcome']}"
        yield _slice(
            pid=track.pid,
            tid=track.tid,
            name=label,
            begin=began,
            end=end,
            args={"version": trajectory.started.version, **args},
        )
        yield from trajectory.inner
        trajectory.lanes.release(track.tid)

    def _count(self, event: ev.EngineSample | ev.PipelineSample) -> Iterator[Record]:
        if isinstance(event, ev.PipelineSample):
            keys = ("running", "scoring", "ready", "training")
            yield _counter(_CONTROL, "pipeline", event.t, {key: getattr(event, key) for key in keys})
            yield _counter(_CONTROL, "environments in use", event.t, {"environments": event.environments})
        else:
            load = {"running": event.running, "waiting": event.waiting}
            yield _counter(_ENGINES, f"{event.engine} requests", event.t, load)
            yield _counter(_ENGINES, f"{event.engine} KV MB", event.t, {"MB": round(event.kv_bytes / 1e6, 3)})

    def _machinery(self, event: ev.AnyEvent) -> Iterator[Record]:
        match event:
            case ev.RunStarted(resumed=True):
                yield from self.close(event.t)
                yield _instant("resumed", event.t, {"version": event.version})
            case ev.ServiceStarted():
                yield from self._put(_CONTROL, f"start {event.name}", f"start {event.name}", event.t, event.seconds)
            case ev.WarmupStep():
                since = event.t if self._warming is None else self._warming
                self._warming = event.t
                args = {"step": event.step, "loss": event.loss}
                yield from self._put(_CONTROL, "trainer", "warmup", event.t, event.t - since, **args)
            case ev.BatchTaken():
                yield from self._put(_CONTROL, "trainer", "wait", event.t, event.waited_s, step=event.step)
            case ev.StepDone():
                args = {"tokens": event.tokens, **event.values}
                yield from self._put(_CONTROL, "trainer", f"step {event.version}", event.t, event.seconds, **args)
            case ev.Published():
                yield from self._put(_CONTROL, "publish", f"publish {event.version}", event.t, event.seconds)
            case ev.Checkpointed():
                yield from self._put(_CONTROL, "checkpoint", f"checkpoint {event.version}", event.t, event.seconds)
            case ev.EngineSwapped():
                args = {
                    "transfer_s": event.transfer_s,
                    "exposed_s": event.exposed_s,
                    "recompute_s": event.recompute_s,
                    "bytes": event.bytes,
                }
                yield from self._put(_ENGINES, event.engine, f"swap to {event.version}", event.t, event.seconds, **args)
            case ev.Evaluated():
                yield _instant(f"{event.task} {event.success:.3f}", event.t, {"version": event.version})
            case ev.Warned():
                yield _instant(event.message, event.t, {})
            case ev.Quarantined():
                yield _instant(f"{event.task} is in quarantine", event.t, {"reason": event.reason})
            case ev.Released():
                yield _instant(f"{event.task} is back in the mixture", event.t, {})
            case _:
                return

    def _put(self, pid: int, track: str, name: str, end: float, seconds: float, **args: object) -> Iterator[Record]:
        made, new = self._track(pid, track)
        yield from new
        yield made.slice(name, end - seconds, end, **args)


def _name(kind: str, pid: int, tid: int, name: str) -> Record:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _counter(pid: int, name: str, t: float, values: Mapping[str, float]) -> Record:
    return {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": _us(t), "args": values}


def _instant(name: str, t: float, args: dict[str, object]) -> Record:
    return {"ph": "i", "s": "g", "pid": _CONTROL, "tid": 0, "name": name, "ts": _us(t), "args": args}


def trace(log: Iterable[ev.AnyEvent]) -> Iterator[Record]:
    timeline = Timeline()
    last = 0.0
    for event in log:
        last = event.t
        yield from timeline.records(event)
    yield from timeline.close(last)


def write(log: Iterable[ev.AnyEvent], path: Path, limit: int = 100_000) -> int:
    """Write the trace with the last `limit` slices of trajectories, and return how many records it has."""
    encode = msgspec.json.Encoder().encode
    number, slices = 0, deque[bytes](maxlen=limit)
    with open(path, "wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for record in trace(log):
            if record["ph"] == "X" and record["pid"] >= _FIRST_TASK:
                slices.append(encode(record))
            else:
                file.write((b",\n" if number else b"") + encode(record))
                number += 1
        for line in slices:
            file.write((b",\n" if number else b"") + line)
            number += 1
        file.write(b"\n]}\n")
    return number
