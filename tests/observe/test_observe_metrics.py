from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_run import SampleRun, sample_run

from rollart.core import events as ev
from rollart.core.types import Outcome
from rollart.observe.metrics import Metrics, measure
from rollart.observe.summary import summarise


def of(log: list[ev.AnyEvent], kind: type[ev.Event]) -> list:  # type: ignore[type-arg]
    return [event for event in log if isinstance(event, kind)]


def trained_on(log: list[ev.AnyEvent]) -> list[ev.TrajectoryEnded]:
    return [event for event in of(log, ev.TrajectoryEnded) if not event.held_out]


@settings(max_examples=6)
@given(seed=st.integers(0, 99), steps=st.integers(1, 25))
def test_the_fold_agrees_with_plain_recomputation(seed: int, steps: int) -> None:
    log = sample_run(seed=seed, steps=steps)
    shot = measure(log)
    ended, batches, done = trained_on(log), of(log, ev.BatchTaken), of(log, ev.StepDone)

    for task in shot.tasks:
        mine = [event for event in ended if event.task == task.name]
        assert task.outcomes == Counter(event.outcome.value for event in mine)
        good = [event for event in mine if event.outcome.trainable][-128:]
        assert task.reward == pytest.approx(sum(event.reward or 0 for event in good) / len(good))
        assert task.turns == pytest.approx(sum(event.turns for event in good) / len(good))
        points = [event for event in of(log, ev.Evaluated) if event.task == task.name]
        assert [(p.version, p.t, p.success) for p in task.held_out] == [(e.version, e.t, e.success) for e in points]
        assert sum(task.stages.values()) == pytest.approx(sum(event.seconds for event in mine), rel=1e-4)

    ages: Counter[int] = Counter()
    for batch in batches:
        ages.update(batch.staleness)
    assert shot.staleness == ages
    assert shot.trained == sum(batch.trajectories for batch in batches)
    dropped = Counter(event.outcome.value for event in ended if not event.outcome.trainable)
    for event in of(log, ev.GroupDropped):
        dropped[event.reason] += event.trajectories
    assert shot.drops == dropped

    begin, end = of(log, ev.GroupStarted)[0].t, done[-1].t
    assert shot.rl_s == pytest.approx(end - begin)
    assert shot.use.trainer == pytest.approx(sum(event.seconds for event in done) / (end - begin))
    assert shot.waited_s == pytest.approx(sum(event.waited_s for event in batches))
    at = log.index(of(log, ev.GroupStarted)[0]), log.index(done[-1])
    turns = of(log[at[0] : at[1]], ev.TurnDone)
    assert shot.metrics["tokens_per_s"].overall == pytest.approx(sum(turn.tokens for turn in turns) / (end - begin))
    assert [point.version for point in shot.history] == [event.version for event in done]
    slowest = sorted((event.seconds for event in ended), reverse=True)[:10]
    assert [each.seconds for each in shot.slowest] == slowest


def test_the_reward_of_a_step_is_that_of_the_trajectories_since_the_last() -> None:
    log = sample_run(steps=6)
    shot = measure(log)
    low = 0.0
    for point in shot.history:
        mine = [e for e in trained_on(log) if low < e.t <= point.t and e.task == "sokoban" and e.reward is not None]
        if mine:
            assert point.rewards["sokoban"] == pytest.approx(sum(e.reward or 0.0 for e in mine) / len(mine))
        low = point.t


def test_memory_is_bounded_by_what_is_in_flight() -> None:
    metrics = Metrics()
    most = 0
    for event in sample_run(steps=10):
        metrics.fold(event)
        most = max(most, len(metrics._open))
    assert most <= 24 * 2
    assert not metrics._open


def test_the_eta_is_the_steps_left_at_the_recent_pace() -> None:
    metrics = Metrics()
    metrics.fold(ev.RunStarted(name="x", preset="rollart", alpha=1, seed=0, steps=10, tasks=["a"]))
    assert metrics.snapshot().eta_s is None
    for version, t in ((1, 10.0), (2, 12.0), (3, 14.0)):
        metrics.fold(ev.StepDone(t=t, version=version, seconds=1, tokens=1, values={}, tasks={}))
    assert metrics.snapshot().eta_s == pytest.approx(7 * 2)
    assert metrics.snapshot(now=15).eta_s == pytest.approx(7 * 2 - 1)
    assert metrics.snapshot(now=1e6).eta_s == 0


def resumed(version: int) -> tuple[list[ev.AnyEvent], list[ev.AnyEvent]]:
    """A log cut in the middle of a step, and what a resume from `version` adds to it."""
    whole = SampleRun(steps=20).make()
    cut = next(i for i, event in enumerate(whole) if isinstance(event, ev.StepDone) and event.version == 14)
    first = whole[: cut + 5]
    again = next(i for i, event in enumerate(whole) if isinstance(event, ev.StepDone) and event.version == version)
    start = ev.RunStarted(
        name="sample", preset="rollart", alpha=1, seed=0, steps=20, tasks=["frozen_lake"], version=version, resumed=True
    )
    start.t = first[-1].t
    return first, [start, *whole[again + 1 :]]


def test_a_resume_takes_back_the_steps_that_are_made_again() -> None:
    first, rest = resumed(10)
    metrics = Metrics()
    for event in first:
        metrics.fold(event)
    assert metrics.version == 14
    metrics.fold(rest[0])
    assert metrics.version == 10
    assert not metrics._open
    for event in rest[1:]:
        metrics.fold(event)
    shot = metrics.snapshot()
    assert [point.version for point in shot.history] == list(range(1, 21))
    assert shot.trained == sum(sum(point.staleness.values()) for point in shot.history)
    assert shot.resumes == 1
    spans = [next(e.t for e in part if isinstance(e, ev.GroupStarted)) for part in (first, rest)]
    lasts = [[e.t for e in part if isinstance(e, ev.StepDone)][-1] for part in (first, rest)]
    assert shot.rl_s == pytest.approx(sum(lasts) - sum(spans))
    for task in shot.tasks:
        versions = [(point.version, point.final) for point in task.held_out]
        assert len(versions) == len(set(versions))


def test_a_restarted_engine_does_not_count_backwards() -> None:
    metrics = Metrics()
    keys = ("version", "running", "waiting", "kv_bytes", "prefilled", "generated")
    for t, busy in ((1, 10.0), (2, 10.5), (3, 0.1), (4, 0.6)):
        metrics.fold(ev.EngineSample(t=t, engine="e", busy_s=busy, **dict.fromkeys(keys, 0)))
    assert metrics._engine.total == pytest.approx(1.0)


def test_reasons_cannot_fill_the_memory() -> None:
    metrics = Metrics()
    for number in range(500):
        metrics.fold(ev.GroupDropped(group="g", task="a", reason=f"reason {number}", trajectories=1))
    assert len(metrics.drops) <= 65
    assert sum(metrics.drops.values()) == 500


def test_the_phases_of_a_run_follow_its_events() -> None:
    metrics = Metrics()
    seen = []
    for event in sample_run(steps=10):
        metrics.fold(event)
        if not seen or seen[-1] != metrics.phase:
            seen.append(metrics.phase)
    assert seen == ["starting", "warming up", "evaluating", "training", "evaluating", "finished"]


def test_a_run_that_failed_says_why() -> None:
    shot = measure([*sample_run(steps=1)[:-1], ev.RunEnded(version=1, reason="the engine died")])
    assert (shot.phase, shot.warnings) == ("failed", ("the engine died",))


def test_waiting_for_an_environment_is_a_stage_of_its_own() -> None:
    name = {"trajectory": "x", "task": "a"}
    shot = measure(
        [
            ev.TrajectoryStarted(t=1, group="g", version=0, **name),
            ev.EnvironmentReset(t=4, seconds=1, **name),
            ev.TurnDone(
                t=10,
                turn=0,
                engine="e",
                prompt=1,
                cached=0,
                tokens=1,
                version=0,
                queue_s=1,
                generate_s=4,
                env_s=2,
                **name,
            ),
            ev.Scored(t=11, seconds=0.5, **name),
            ev.TrajectoryEnded(t=11, group="g", outcome=Outcome.FINISHED, turns=1, tokens=1, seconds=10, **name),
        ]
    )
    stages = {"claim": 2, "reset": 1, "queue": 1, "generate": 3, "step": 2, "score": 0.5, "other": 0.5}
    assert shot.slowest[0].stages == pytest.approx(stages)


def test_a_failure_is_not_a_reward_of_zero() -> None:
    metrics = Metrics()
    for outcome, reward in ((Outcome.FINISHED, 1.0), (Outcome.ENV_FAILED, None), (Outcome.REWARD_FAILED, None)):
        metrics.fold(
            ev.TrajectoryEnded(
                trajectory="x", task="a", group="g", outcome=outcome, turns=1, tokens=1, seconds=1, reward=reward
            )
        )
    assert metrics.snapshot().task("a").reward == 1.0


def test_the_summary_tells_before_and_after() -> None:
    summary = summarise(measure(sample_run(steps=20)))
    lake = summary["tasks"]["frozen_lake"]
    assert (lake["before"], lake["after"]) == (0.1, 0.986)
    assert lake["failure_ratio"] == pytest.approx((1 - 0.986) / (1 - 0.1), rel=1e-4)
    assert summary["version"] == 20
