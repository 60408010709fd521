"""The rollout scheduler: owns every trajectory from its start to the batch that trains it.

Invariants
- `next` is the batch to be formed next. A group that starts now meets at worst policy version `serving`, so it may
  still be trained by batch `serving + alpha`: only groups for batches `next .. serving + alpha` are open at once.
- An open group is running or ready and stands in `_groups` in start order; it leaves by being leased or dropped, once.
- A group that closes cancels the members still running.
- A quarantined task has no share of any batch and no group under way but its probe; what it has ready waits, within the
  bound, for its return.
- Everything happens on one event loop: state changes between two awaits are atomic.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from rollart.core.errors import RollartError
from rollart.core.events import (
    BatchTaken,
    EventSink,
    GroupDropped,
    GroupReady,
    GroupStarted,
    PipelineSample,
    Quarantined,
    Released,
)
from rollart.core.schedule import QuarantineRule, Schedule
from rollart.core.seeds import seed_of
from rollart.core.types import Batch, Outcome, SampleGroup, Trajectory
from rollart.rollout.attempts import Attempts
from rollart.rollout.batcher import choose
from rollart.rollout.groups import Group
from rollart.rollout.ledger import GroupRecord, Ledger, Recovery
from rollart.rollout.mixture import Mixture
from rollart.rollout.quarantine import Quarantine
from rollart.rollout.router import Router
from rollart.rollout.samples import sample_group
from rollart.rollout.trajectory import RolloutTask, TrajectoryRunner

_OUT = "its task is quarantined"

_RULE = QuarantineRule()


class Scheduler:
    def __init__(
        self,
        *,
        tasks: Sequence[RolloutTask],
        schedule: Schedule,
        batch_groups: int,
        group_size: int,
        steps: int,
        retries: int,
        seed: int,
        player: TrajectoryRunner,
        router: Router,
        ledger: Ledger,
        sink: EventSink,
        rule: QuarantineRule = _RULE,
        to_samples: Callable[[Group], SampleGroup] = sample_group,
    ) -> None:
        self.schedule = schedule
        self.mixture = Mixture({task.name: task.weight for task in tasks}, batch_groups)
        self.next = 0
        self._tasks = {task.name: task for task in tasks}
        self._quarantine = Quarantine(self._tasks, rule)
        self._size, self._steps, self._retries, self._seed = group_size, steps, retries, seed
        self._router, self._ledger, self._sink = router, ledger, sink
        self._members = Attempts(player, schedule.score_late, self._saw, self._ended, self._fail)
        self._to_samples = to_samples
        router.on_change = self.admit
        self._groups: dict[str, dict[str, Group]] = {task.name: {} for task in tasks}
        self._ready: Counter[str] = Counter()
        self._index: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._stopped = False
        self.training = 0

    # Views

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def running(self) -> int:
        return self._members.running

    @property
    def ready(self) -> int:
        return sum(len(group.done) for groups in self._groups.values() for group in groups.values())

    def sample(self, environments: int, processes: int) -> PipelineSample:
        """Where trajectories are, beside the environments in use and those there are."""
        members = self._members
        return PipelineSample(
            running=members.running,
            scoring=members.scoring,
            ready=self.ready,
            training=self.training,
            environments=environments,
            processes=processes,
        )

    # Admission

    def recover(self, recovery: Recovery) -> None:
        """Go on where an earlier run stopped: nothing that was ready is lost, missing members are launched again."""
        self.next = recovery.version
        self._set_floor()
        self._index.update(recovery.next_index)
        self._restore_quarantine({task: times for task, times in recovery.out.items() if task in self._tasks})
        for past in recovery.groups:
            record = past.record
            if record.task not in self._groups:
                self._ledger.drop(record.id, "the task is gone from the run file")
                continue
            if record.task in self._quarantine.times and len(past.trajectories) < record.size:
                self._ledger.drop(record.id, _OUT)
                continue
            group = Group(record.id, record.task, record.index, record.seed, record.size, record.version)
            group.launched = past.launched
            group.started_s = self._now()
            group.done = list(past.trajectories[: record.size])
            for trajectory in group.done:
                group.saw(trajectory.oldest if trajectory.oldest is not None else record.version)
            self._groups[record.task][group.id] = group
            self._ready[record.task] += group.ready
        self._evict()
        for groups in self._groups.values():
            for group in groups.values():
                self._fill(group)

    def admit(self) -> None:
        """Start what may start now. Call it whenever `next` or `serving` moved, or a group closed."""
        if self._stopped or self._error is not None:
            return
        self._set_floor()
        last = min(self._router.serving + self.schedule.alpha, self._steps - 1)
        if self.schedule.one_batch:
            last = min(last, self.next)
        for task, groups in self._groups.items():
            limit = sum(self.mixture.quota(batch)[task] for batch in range(self.next, last + 1))
            if limit:
                limit += self.schedule.extra_groups
            while len(groups) < limit:
                self._open(task)
        if last >= self.next:
            for task in self._quarantine.due(self._now()):
                self._open(task, probe=True)

    def _set_floor(self) -> None:
        """What is older than `next - alpha` would be stale at birth. What is older than `serving` would break the
        promise to groups that start now: an engine that was left behind may come back only with later weights."""
        if not self.schedule.swap_late:
            self._router.floor = max(self.next - self.schedule.alpha, self._router.serving)

    def _open(self, task: str, probe: bool = False) -> None:
        index = self._index[task]
        self._index[task] += 1
        version = self._router.serving
        group = Group(f"{task}-{index:06d}", task, index, seed_of(self._seed, task, index), self._size, version)
        group.started_s, group.probe = self._now(), probe
        self._ledger.start(GroupRecord(group.id, task, index, group.seed, self._size, version))
        self._sink.emit(
            GroupStarted(
                group=group.id,
                task=task,
                seed=group.seed,
                members=self._size + self.schedule.extra_members,
                version=version,
            )
        )
        self._groups[task][group.id] = group
        self._fill(group)

    def _fill(self, group: Group) -> None:
        if missing := group.missing(self.schedule.extra_members):
            serving = self._router.serving
            for _ in range(missing):
                self._members.launch(group, self._tasks[group.task], serving)

    # One member

    def _ended(self, group: Group, trajectory: Trajectory) -> None:
        self._ledger.add(trajectory)
        self._settle(group, trajectory)

    def _saw(self, group: Group, version: int) -> None:
        group.saw(version)
        if not group.closed and not group.probe and not self.schedule.within(group.oldest, self.next):
            self._drop(group, "stale", Outcome.STALE)
            self.admit()

    def _settle(self, group: Group, trajectory: Trajectory) -> None:
        if not group.probe and (why := self._quarantine.saw(group.task, trajectory.outcome)):
            self._leave_out(why, trajectory)
        if group.closed or group.ready:
            return
        if trajectory.outcome.trainable:
            group.done.append(trajectory)
            if group.ready:
                self._complete(group)
        elif trajectory.outcome not in (Outcome.CANCELLED, Outcome.STALE):
            group.failures += 1
            if group.failures > self._retries:
                self._give_up(group, trajectory)
                self.admit()
            else:
                self._fill(group)

    def _give_up(self, group: Group, last: Trajectory) -> None:
        self._drop(group, f"too many failed members, the last: {last.outcome}")
        if group.probe:
            wait = self._quarantine.probe_failed(group.task, self._now())
            self._tell_out(wait, "it still fails", last)
        elif why := self._quarantine.gave_up(group.task):
            self._leave_out(why, last)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._changed.set()

    def _complete(self, group: Group) -> None:
        self._members.cancel(group, Outcome.CANCELLED, "its group is complete")
        self._ready[group.task] += 1
        self._sink.emit(GroupReady(group=group.id, task=group.task, seconds=self._now() - group.started_s))
        if group.probe:
            self._take_back(group)
        self._quarantine.completed(group.task)
        self._changed.set()

    def _drop(self, group: Group, reason: str, verdict: Outcome = Outcome.CANCELLED) -> None:
        group.closed = True
        del self._groups[group.task][group.id]
        self._ready[group.task] -= group.ready
        self._members.cancel(group, verdict, reason)
        self._ledger.drop(group.id, reason)
        self._sink.emit(GroupDropped(group=group.id, task=group.task, reason=reason, trajectories=len(group.done)))

    # Quarantine

    def _leave_out(self, why: str, last: Trajectory) -> None:
        """The others share what the task had of every batch to come."""
        wait = self._quarantine.leave_out(last.task, self._now())
        self._tell_out(wait, why, last)
        if not self._quarantine.active:
            tasks = f"task {last.task} fails" if len(self._tasks) == 1 else "every task fails"
            self._fail(RollartError(f"{tasks} and nothing is left to train on; {last.task}: {why}, {_told(last)}"))
            return
        self.mixture.only(self._quarantine.active, self.next)
        for group in [group for group in self._groups[last.task].values() if not group.ready]:
            self._drop(group, _OUT)
        self._changed.set()
        self.admit()

    def _restore_quarantine(self, times: dict[str, int]) -> None:
        """What was left out stays out, unless that was every task and so the end of the run: then each has a chance."""
        if len(times) == len(self._tasks):
            for task in times:
                self._ledger.take_back(task)
        elif times:
            self._stay_out(times)

    def _stay_out(self, times: dict[str, int]) -> None:
        self._quarantine.restore(times, self._now())
        self.mixture.only(self._quarantine.active, self.next)
        for task in times:
            self._sink.emit(Quarantined(task=task, reason="it was left out before the run was resumed", wait_s=0.0))

    def _tell_out(self, wait: float, why: str, last: Trajectory) -> None:
        self._ledger.leave_out(last.task, self._quarantine.times[last.task])
        self._sink.emit(Quarantined(task=last.task, reason=f"{why}, {_told(last)}", wait_s=wait))

    def _take_back(self, probe: Group) -> None:
        probe.probe = False
        seconds = self._quarantine.take_back(probe.task, self._now())
        self._ledger.take_back(probe.task)
        self._sink.emit(Released(task=probe.task, seconds=seconds))
        self.mixture.only(self._quarantine.active, self.next)
        self._evict()  # the probe itself may have become too old
        self.admit()

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

    def _choose(self) -> list[Group] | None:
        quota = self.mixture.quota(self.next)
        if any(self._ready[task] < need for task, need in quota.items()):
            return None
        return choose(quota, self._groups, self.schedule.window)

    def _lease(self, groups: list[Group], waited: float) -> Batch:
        step = self.next
        self._ledger.lease(step, [group.id for group in groups])
        staleness: Counter[int] = Counter()
        for group in groups:
            group.closed = True
            del self._groups[group.task][group.id]
            self._ready[group.task] -= 1
            staleness.update(max(0, step - (t.oldest if t.oldest is not None else step)) for t in group.done)
        self.training = sum(len(group.done) for group in groups)
        self._sink.emit(
            BatchTaken(
                step=step,
                ids=[group.id for group in groups],
                groups=Counter(group.task for group in groups),
                trajectories=self.training,
                tokens=sum(t.total_tokens for group in groups for t in group.done),
                waited_s=waited,
                staleness=staleness,
            )
        )
        self.next = step + 1
        self._evict()
        self.admit()
        return Batch(step, tuple(self._to_samples(group) for group in groups))

    def _evict(self) -> None:
        """Drop at once what no later batch could train within the bound."""
        for groups in self._groups.values():
            for group in [g for g in groups.values() if not self.schedule.within(g.oldest, self.next)]:
                if not group.probe:
                    self._drop(group, "stale", Outcome.STALE)

    # The end

    async def quiet(self) -> None:
        """Until no trajectory is under way."""
        await self._members.quiet()

    async def stop(self) -> None:
        """Cancel all that runs. Open groups stay open in the ledger: `--resume` goes on with them."""
        self._stopped = True
        await self._members.stop()


def _told(last: Trajectory) -> str:
    return f"the last as {last.outcome}: {last.reason}"
