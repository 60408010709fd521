"""The event log as a Chrome trace, for Perfetto or chrome://tracing.

Trajectories are packed into lanes: one takes the first lane of its task that is free and releases it when it ends, so
there are only as many lanes as there were trajectories at once. Within a track, slices nest or follow, never cross.
The slices of a trajectory are made when they are written: of a long run, only the last ones are.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollart.core import events as ev
from rollart.core import gc_tuning

Record = dict[str, Any]

KINDS = (
    *(ev.RunStarted, ev.TrajectoryStarted, ev.EnvironmentReset, ev.TurnDone, ev.Scored, ev.TrajectoryEnded),
    *(ev.EngineSample, ev.PipelineSample, ev.ServiceStarted, ev.WarmupStep, ev.BatchTaken, ev.StepDone, ev.Published),
    *(ev.Checkpointed, ev.EngineSwapped, ev.Evaluated, ev.Warned, ev.Quarantined, ev.Released, ev.RunEnded),
)
"""The events that a trace shows; others need not be decoded."""
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


Inside = ev.EnvironmentReset | ev.TurnDone | ev.Scored
_TURN = ("turn", "engine", "version", "prompt", "cached", "tokens", "queue_s")


@dataclass(slots=True)
class TracedTrajectory:
    """A trajectory in its lane, with what happened inside it and, once it has ended, when and how."""

    lanes: Lanes
    lane: int
    started: ev.TrajectoryStarted
    inside: list[Inside] = field(default_factory=list)
    t: float = 0.0
    ended: ev.TrajectoryEnded | None = None

    @property
    def events(self) -> int:
        return 1 + len(self.inside)

    def slices(self) -> list[Record]:
        """The whole first, then its parts."""
        began = _us(self.started.t)
        track = Track(self.lanes.pid, self.lane, began)
        parts = [part for event in self.inside for part in self._parts(track, event)]
        args = {"outcome": "lost"} if self.ended is None else msgspec.to_builtins(self.ended)
        whole = _slice(
            pid=track.pid,
            tid=track.tid,
            name=f"{self.started.trajectory} {args['outcome']}",
            begin=began,
            end=max(_us(self.t), track.free),
            args={"version": self.started.version, **args},
        )
        return [whole, *parts]

    def _parts(self, track: Track, event: Inside) -> Iterator[Record]:
        match event:
            case ev.TurnDone():
                acted = event.t - event.env_s
                args = {key: getattr(event, key) for key in _TURN}
                yield track.slice("generate", acted - event.generate_s, acted, **args)
                yield track.slice("env step", acted, event.t, turn=event.turn)
            case ev.EnvironmentReset():
                began = event.t - event.seconds
                if _us(began) > track.free:
                    yield track.slice("wait for an environment", self.started.t, began)
                yield track.slice("reset", began, event.t)
            case ev.Scored():
                yield track.slice("score", event.t - event.seconds, event.t)


def _slice(pid: int, tid: int, name: str, begin: int, end: int, args: dict[str, object]) -> Record:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": begin, "dur": end - begin, "args": args}


class Timeline:
    """Feed it the events in order; `add` returns what each one adds to the trace: records, and trajectories that
    ended."""

    def __init__(self) -> None:
        self._tasks: dict[str, Lanes] = {}
        self._tracks: dict[tuple[int, str], Track] = {}
        self._open: dict[str, TracedTrajectory] = {}
        self._warming: float | None = None
        self._engines = "engines"

    def add(self, event: ev.AnyEvent) -> Iterable[Record | TracedTrajectory]:
        match event:
            case ev.TurnDone() | ev.EnvironmentReset() | ev.Scored():
                if (trajectory := self._open.get(event.trajectory)) is not None:
                    trajectory.inside.append(event)
                return ()
            case ev.TrajectoryStarted():
                return self._begin(event)
            case ev.TrajectoryEnded():
                return self._end(event.trajectory, event.t, event)
            case ev.EngineSample() | ev.PipelineSample():
                return self._count(event)
            case _:
                return self._machinery(event)

    def close(self, t: float) -> Iterator[TracedTrajectory]:
        """What was still running at `t`: the run was killed or stopped there."""
        for name in list(self._open):
            yield from self._end(name, t)

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

    def _begin(self, event: ev.TrajectoryStarted) -> list[Record]:
        lanes, new = self._lanes(f"{event.task} (held out)" if event.held_out else event.task)
        before, lane = lanes.made, lanes.take()
        self._open[event.trajectory] = TracedTrajectory(lanes, lane, event)
        return [*new, _name("thread_name", lanes.pid, lane, f"lane {lane}")] if lanes.made > before else new

    def _end(self, name: str, t: float, event: ev.TrajectoryEnded | None = None) -> Iterable[TracedTrajectory]:
        trajectory = self._open.pop(name, None)
        if trajectory is None:
            return ()
        trajectory.t, trajectory.ended = t, event
        trajectory.lanes.release(trajectory.lane)
        return (trajectory,)

    def _count(self, event: ev.EngineSample | ev.PipelineSample) -> Iterator[Record]:
        if isinstance(event, ev.PipelineSample):
            keys = ("running", "scoring", "ready", "training")
            yield _counter(_CONTROL, "pipeline", event.t, {key: getattr(event, key) for key in keys})
            yield _counter(_CONTROL, "environments in use", event.t, {"environments": event.environments})
        else:
            load = {"running": event.running, "waiting": event.waiting}
            yield _counter(_ENGINES, f"{event.engine} requests", event.t, load)
            yield _counter(_ENGINES, f"{event.engine} KV MB", event.t, {"MB": round(event.kv_bytes / 1e6, 3)})

    def _machinery(self, event: ev.AnyEvent) -> Iterator[Record | TracedTrajectory]:
        match event:
            case ev.RunStarted():
                if event.emulated:
                    self._engines = f"engines (EMULATED: {', '.join(event.emulated)})"
                if event.resumed:
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


def _traced(log: Iterable[ev.AnyEvent]) -> Iterator[Record | TracedTrajectory]:
    timeline = Timeline()
    last = 0.0
    for event in log:
        last = event.t
        yield from timeline.add(event)
    yield from timeline.close(last)


def trace(log: Iterable[ev.AnyEvent]) -> Iterator[Record]:
    for each in _traced(log):
        if isinstance(each, TracedTrajectory):
            yield from each.slices()
        else:
            yield each


def write(log: Iterable[ev.AnyEvent], path: Path, limit: int = 100_000) -> int:
    """Write the trace with the last `limit` slices of trajectories, and return how many records it has."""
    encode = msgspec.json.Encoder().encode
    number, last, events = 0, deque[TracedTrajectory](), 0
    with gc_tuning.disabled(), open(path, "wb") as file:  # what is kept has no reference cycles

        def put(record: Record) -> None:
            nonlocal number
            file.write((b",\n" if number else b"") + encode(record))
            number += 1

        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for each in _traced(log):
            if not isinstance(each, TracedTrajectory):
                put(each)
                continue
            last.append(each)
            events += each.events
            while events - last[0].events >= limit:  # an event is at least one slice
                events -= last.popleft().events
        for record in _last_slices(last, limit):
            put(record)
        file.write(b"\n]}\n")
    return number


def _last_slices(trajectories: Iterable[TracedTrajectory], limit: int) -> list[Record]:
    made: list[list[Record]] = []
    left = limit
    for trajectory in reversed(list(trajectories)):
        if left <= 0:
            break
        made.append(trajectory.slices())
        left -= len(made[-1])
    return [record for slices in reversed(made) for record in slices][-limit:]
