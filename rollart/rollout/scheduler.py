"""The rollout scheduler: owns every trajectory from its start to the batch that trains it.

Invariants
- `next` is the batch to be formed next. A group that starts now meets at worst policy version `serving`, so it may
  still be trained by batch `serving + alpha`: only groups for batches `next .. serving + alpha` are open at once.
- An open group is running or ready and is in `_groups` in start order; it leaves by being leased or dropped, once.
- A group that closes cancels the members still running.
- A quarantined task has no share of any batch and no group under way but its probe; its ready groups wait, within the
  staleness bound, for its return.
- Everything happens on one event loop: state changes between two awaits are atomic.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev

from rollart.core.errors import RollartError
from rollart.core.events import (
    NULL_SINK,
    EventSink,
    GroupDropped,
    GroupReady,
    GroupStarted,
    PipelineSample,
    Quarantined,
    Released,
)
from rollart.core.protocols import PolicyServers
from rollart.core.schedule import QuarantineRule, Schedule
from rollart.core.types import Batch, Outcome, SampleGroup, Trajectory
from rollart.rollout.attempts import Attempts
from rollart.rollout.elastic import BatchSizer
from rollart.rollout.evaluation import EpisodeRunner
from rollart.rollout.filters import LESS_SPREAD, Curriculum, GroupFilters
from rollart.rollout.groups import Group
from rollart.rollout.ledger import GroupRecord, Ledger, OpenGroup, Recovery
from rollart.rollout.mixture import Mixture, choose_batch
from rollart.rollout.quarantine import Fault, Quarantine
from rollart.rollout.samples import batch_taken, prepare, sample_group
from rollart.rollout.trajectory import RolloutTask

_QUARANTINED = "its task is quarantined"
_RULE = QuarantineRule()


class Scheduler:
    """`retries`: failed members that a group survives. `engines` are those that the runner's trajectories use."""

    def __init__(
        self,
        *,
        tasks: Sequence[RolloutTask],
        schedule: Schedule,
        batch_groups: int,
        group_size: int,
        steps: int,
        runner: EpisodeRunner,
        engines: PolicyServers,
        ledger: Ledger,
        retries: int = 2,
        seed: int = 0,
        sink: EventSink = NULL_SINK,
        quarantine: QuarantineRule = _RULE,
        to_samples: Callable[[Group], SampleGroup] = sample_group,
    ) -> None:
        self.schedule, self.next = schedule, 0
        plans = {task.name: task.plan for task in tasks if task.plan}
        self.mixture = Mixture({task.name: task.weight for task in tasks}, batch_groups, plans)
        self._sizer = BatchSizer(batch_groups, schedule.elastic, schedule.alpha)
        self._opened = -1  # the last batch that may have groups
        self._filters = GroupFilters({task.name: task.rule for task in tasks if task.rule})
        self._curriculum = Curriculum({task.name: task.band for task in tasks if task.band})
        self._tasks = {task.name: task for task in tasks}
        self._quarantine = Quarantine({task.name: task.reward for task in tasks}, quarantine)
        self._size, self._steps, self._retries, self._seed = group_size, steps, retries, seed
        self._ledger, self._sink, self._to_samples = ledger, sink, to_samples
        self._attempts = Attempts(
            runner,
            score_late=schedule.score_late,
            on_version=self._record_version,
            on_end=self._attempt_ended,
            on_bug=self._fail,
        )
        self._groups: dict[str, dict[str, Group]] = {task.name: {} for task in tasks}
        self._ready, self._index = Counter[str](), Counter[str]()
        self._training, self._stopped = 0, False
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._engines = engines
        self._unsubscribe = self._engines.subscribe(self.admit)

    # Views

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def running(self) -> int:
        return self._attempts.running

    @property
    def ready(self) -> int:
        return sum(map(self._done, self._groups))

    def sample(self, environments: int, processes: int) -> PipelineSample:
        """Trajectories by stage, with the environments in use and all there are."""
        return PipelineSample(
            running=self._attempts.running,
            scoring=self._attempts.scoring,
            ready=self.ready,
            training=self._training,
            environments=environments,
            processes=processes,
            tasks={
                task: (sum(len(group.running) for group in groups.values()), self._done(task))
                for task, groups in self._groups.items()
            },
        )

    def _done(self, task: str) -> int:
        return sum(len(group.done) for group in self._groups[task].values())

    # Admission

    def recover(self, recovery: Recovery) -> None:
        """Continue where an earlier run stopped: nothing that was ready is lost, missing members are launched again."""
        self.next = recovery.version
        self._set_floor()
        self._index.update(recovery.next_index)
        self._curriculum.restore(recovery.recent)
        self.mixture.scale(self._curriculum.factors(), self.next)
        self._sizer.restore(len(recovery.groups) // (self.schedule.alpha + 1))
        self.mixture.resize(self._sizer.size, self.next)
        self._restore_quarantine({task: times for task, times in recovery.quarantined.items() if task in self._tasks})
        for past in recovery.groups:
            record = past.record
            out = record.task in self._quarantine.times and len(past.trajectories) < record.size
            if out or record.task not in self._groups:
                self._drop_recovered(past, _QUARANTINED if out else "the task is gone from the run file")
                continue
            group = Group.of(record, self._now())
            group.launched = past.launched
            group.done = list(past.trajectories[: record.size])
            for trajectory in group.done:
                group.record_version(trajectory.oldest if trajectory.oldest is not None else record.version)
            self._groups[record.task][group.id] = group
            self._ready[record.task] += group.ready
        self._evict()
        for groups in self._groups.values():
            for group in groups.values():
                self._launch_missing(group)

    def _drop_recovered(self, past: OpenGroup, reason: str) -> None:
        id, task, dropped = past.record.id, past.record.task, len(past.trajectories)
        self._ledger.drop(id, reason)
        self._sink.emit(GroupDropped(group=id, task=task, reason=reason, trajectories=dropped))

    def admit(self) -> None:
        """Start what may start now: called whenever `next` or `serving` moved, or a group closed."""
        if self._stopped or self._error is not None:
            return
        self._set_floor()
        last = min(self._engines.serving + self.schedule.alpha, self._steps - 1)
        if self.schedule.one_batch:
            last = min(last, self.next)
        self._opened = max(self._opened, last)
        for task, groups in self._groups.items():
            quotas = (self.mixture.quota(batch) for batch in range(self.next, last + 1))
            limit = sum(self._filters.candidates(quota)[task] for quota in quotas)
            limit += self.schedule.extra_groups if limit else 0
            while len(groups) < limit:
                self._start_group(task)
        if last >= self.next:
            for task in self._quarantine.due(self._now()):
                self._start_group(task, probe=True)

    def _set_floor(self) -> None:
        """Tokens older than `next - alpha` would be stale at birth. Tokens older than `serving` would break the bound
        of groups that start now: an engine that was left behind may come back only with later weights."""
        if not self.schedule.swap_late:
            self._engines.require(max(self.next - self.schedule.alpha, self._engines.serving))

    def _start_group(self, task: str, probe: bool = False) -> None:
        index = self._index[task]
        self._index[task] += 1
        record = GroupRecord(
            id=f"{task}-{index:06d}",
            task=task,
            index=index,
            seed=self._tasks[task].episode_seed(index, self._seed, run_seed=self._seed),
            size=self._tasks[task].group_size or self._size,
            version=self._engines.serving,
        )
        group = self._groups[task][record.id] = Group.of(record, self._now(), probe)
        self._ledger.start(record)
        self._sink.emit(
            GroupStarted(
                group=group.id,
                task=task,
                seed=group.seed,
                members=group.size + self.schedule.extra_members,
                version=group.version,
            )
        )
        self._launch_missing(group)

    def _launch_missing(self, group: Group) -> None:
        for _ in range(group.missing(self.schedule.extra_members)):
            self._attempts.launch(group, self._tasks[group.task], self._engines.serving)

    # One attempt

    def _record_version(self, group: Group, version: int) -> None:
        if group.oldest is not None and version >= group.oldest:
            return  # as nearly always; `_evict` looks at all groups whenever `next` moves
        group.record_version(version)
        if not group.closed and not group.probe and not self.schedule.within(group.oldest, self.next):
            self._drop(group, "stale", Outcome.STALE)
            self.admit()

    def _attempt_ended(self, group: Group, trajectory: Trajectory) -> None:
        self._ledger.add(trajectory)
        self._curriculum.record(trajectory)
        started, ended = trajectory.started_s, trajectory.started_s + trajectory.seconds
        if not group.probe:
            self._act_on(self._quarantine.record(group.task, trajectory.outcome, started, ended), trajectory)
        if group.closed or group.ready:
            return
        if trajectory.outcome.trainable:
            group.done.append(trajectory)
            if group.ready:
                self._complete(group)
        elif trajectory.outcome not in (Outcome.CANCELLED, Outcome.STALE):
            # An outage takes many members at once: a group is not dropped for it, what it has is good.
            group.failures += trajectory.outcome is not Outcome.ENGINE_FAILED or group.probe
            if group.failures > self._retries:
                self._give_up(group, trajectory)
                self.admit()
            else:
                self._launch_missing(group)

    def _give_up(self, group: Group, last: Trajectory) -> None:
        self._drop(group, f"too many failed members, the last: {last.outcome}")
        if group.probe:
            wait = self._quarantine.probe_failed(group.task, self._now())
            self._report_quarantine(group.task, wait, "it still fails", last)
        else:
            self._act_on(self._quarantine.group_failed(group.task, last.outcome), last)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._changed.set()

    def _complete(self, group: Group) -> None:
        self._attempts.cancel(group, Outcome.CANCELLED, "its group is complete")
        self._ready[group.task] += 1
        rewards = [trajectory.reward or 0.0 for trajectory in group.done]
        self._sink.emit(
            GroupReady(
                group=group.id,
                task=group.task,
                seconds=self._now() - group.started_s,
                reward=fmean(rewards),
                spread=pstdev(rewards),
            )
        )
        if group.probe:
            self._release_task(group)
        self._quarantine.group_completed(group.task)
        if not group.closed and (reason := self._filters.verdict(group)):
            self._drop(group, reason)
            self.admit()
        if not group.closed:
            group.prepared = prepare(group, self._to_samples)
        self._changed.set()

    def _drop(self, group: Group, reason: str, verdict: Outcome = Outcome.CANCELLED) -> None:
        group.closed = True
        del self._groups[group.task][group.id]
        self._ready[group.task] -= group.ready
        self._attempts.cancel(group, verdict, reason)
        self._ledger.drop(group.id, reason)
        self._sink.emit(GroupDropped(group=group.id, task=group.task, reason=reason, trajectories=len(group.done)))

    # Quarantine

    def _act_on(self, fault: Fault | None, last: Trajectory) -> None:
        """The other tasks share the part of those in the fault of every batch to come."""
        if fault is None:
            return
        for task in fault.tasks:
            self._report_quarantine(task, self._quarantine.quarantine(task, self._now()), fault.why, last)
        if not self._quarantine.active:
            tasks = f"task {last.task} fails" if len(self._tasks) == 1 else "every task fails"
            why = f"{last.task}: {fault.why}, {_describe(last)}"
            self._fail(RollartError(f"{tasks} and nothing is left to train on; {why}"))
            return
        self.mixture.only(self._quarantine.active, self.next)
        for task in fault.tasks:
            for group in [group for group in self._groups[task].values() if not group.ready]:
                self._drop(group, _QUARANTINED)
        self._changed.set()
        self.admit()

    def _report_quarantine(self, task: str, wait: float, why: str, last: Trajectory) -> None:
        self._ledger.quarantine(task, self._quarantine.times[task])
        self._sink.emit(Quarantined(task=task, reason=f"{why}, {_describe(last)}", wait_s=wait))

    def _release_task(self, probe: Group) -> None:
        probe.probe = False
        seconds = self._quarantine.release(probe.task, self._now())
        self._ledger.release(probe.task)
        self._sink.emit(Released(task=probe.task, seconds=seconds))
        self.mixture.only(self._quarantine.active, self.next)
        self._evict()  # the probe itself may have become too old
        self.admit()

    def _restore_quarantine(self, times: dict[str, int]) -> None:
        """Quarantined tasks stay out, unless all were, which ended the run: then each gets another chance."""
        if len(times) == len(self._tasks):
            for task in times:
                self._ledger.release(task)
        elif times:
            self._quarantine.restore(times, self._now())
            self.mixture.only(self._quarantine.active, self.next)
            for task in times:
                self._sink.emit(Quarantined(task=task, reason="it was left out before the run was resumed", wait_s=0.0))

    # Batches

    async def take_batch(self) -> Batch:
        """The next batch, leased. Waits as long as rollout makes progress; trajectories have deadlines of their own."""
        began = self._now()
        while True:
            if self._error is not None:
                raise self._error
            self.admit()
            if (groups := self._choose()) is not None:
                return self._lease(groups, self._now() - began)
            self._changed.clear()
            await self._changed.wait()

    def finish_step(self) -> None:
        """The last batch is trained."""
        self._training = 0

    async def prepare_swap(self, version: int) -> None:
        """Called before engines load `version`. With `swap_late`, waits until no attempt is under way; attempts that
        start after that use `version`."""
        if self.schedule.swap_late:
            await self._attempts.wait()
            self._engines.require(version)

    def _choose(self) -> list[Group] | None:
        candidates = self._filters.candidates(quota := self.mixture.quota(self.next))
        if any(self._ready[task] < need for task, need in candidates.items()):
            return None
        found = choose_batch(candidates, self._groups, self.schedule.window)
        if found is None:
            return None
        batch, others = self._filters.choose(found, quota)
        for group in others:
            self._drop(group, LESS_SPREAD)
        return batch

    def _lease(self, groups: list[Group], waited: float) -> Batch:
        step = self.next
        self._ledger.lease(step, [group.id for group in groups])
        for group in groups:
            group.closed = True
            del self._groups[group.task][group.id]
            self._ready[group.task] -= 1
        prepared = [group.prepared or prepare(group, self._to_samples) for group in groups]
        self._sink.emit(taken := batch_taken(step, groups, [each.members for each in prepared], waited))
        self._training = taken.trajectories
        self._sizer.taken(len(groups), self._now(), waited)
        self.mixture.resize(self._sizer.size, self._opened + 1)
        self.next = step + 1
        self.mixture.scale(self._curriculum.factors(), self.next)
        self._evict()
        self.admit()
        return Batch(step, tuple(each.samples for each in prepared))

    def _evict(self) -> None:
        """Drop what no later batch could train within the staleness bound."""
        for groups in self._groups.values():
            for group in [g for g in groups.values() if not self.schedule.within(g.oldest, self.next)]:
                if not group.probe:
                    self._drop(group, "stale", Outcome.STALE)

    async def stop(self) -> None:
        """Cancel every attempt. Open groups stay open in the ledger: `--resume` continues them."""
        self._stopped = True
        self._unsubscribe()
        await self._attempts.stop()


def _describe(last: Trajectory) -> str:
    return f"the last as {last.outcome}: {last.reason}"
