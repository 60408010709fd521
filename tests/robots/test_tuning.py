"""RL of an imitated policy: exact log-probabilities, groups on their own clocks, the staleness bound, resume."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load
from typer.testing import CliRunner

from rollart.app.cli import app
from rollart.config import loading
from rollart.config.robots import RobotRunFile
from rollart.core.errors import EnvironmentFailed, RollartError
from rollart.core.event_log import EventLog, read_events
from rollart.core.events import (
    BatchTaken,
    Checkpointed,
    Evaluated,
    GroupDropped,
    GroupStarted,
    RunStarted,
    StepDone,
    TrajectoryEnded,
)
from rollart.core.schedule import Schedule
from rollart.core.types import Message, Publication, Step, Trajectory
from rollart.envs.obstacle import Obstacle, player
from rollart.observe.snapshot import words_of
from rollart.robots import imitation
from rollart.robots.chunks import ImitationData
from rollart.robots.demonstrations import checked
from rollart.robots.exploration import ActingPolicy, RobotRunner, chunk_batch
from rollart.robots.learner import DivergedError, ImitationLearner, LearnerConfig, TrainedPolicy
from rollart.robots.suites import robot_task
from rollart.robots.tuning import gain_of, tune
from rollart.robots.tuning_learner import ChunkBatch, TuningLearner, learner_config
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.scheduler import Scheduler
from rollart.rollout.trajectory import RolloutTask

TASK = robot_task("toy:obstacle")
RUN = {
    "task": "toy:obstacle",
    "demonstrations": {"episodes": 4},
    "control": {"history": 1, "chunk": 8, "execute": 8},
    "network": {"width": 16, "layers": 1},
    "training": {"steps": 40, "batch": 16, "lr_warmup": 5},
    "evaluation": {"episodes": 4, "quick": 2},
    "tuning": {"steps": 3, "groups": 2, "group_size": 2, "candidates": 4, "optimizer_steps": 3, "checkpoint_every": 2},
}


def run_file(**tuning: object) -> RobotRunFile:
    return RobotRunFile.model_validate({**RUN, "tuning": {**RUN["tuning"], **tuning}})


class LocalPool:
    """The obstacle in this process. `gate(seed)`: what a reset waits for, or None; `broken(claim)`: whether the claim
    with this number fails."""

    def __init__(self, gate=lambda seed: None, broken=lambda claim: False) -> None:
        self.claims, self.gate, self.broken = 0, gate, broken

    @asynccontextmanager
    async def claim(self, task: str, held_out: bool) -> AsyncIterator["LocalClaim"]:
        self.claims += 1
        if self.broken(self.claims):
            raise EnvironmentFailed("the simulator crashed")
        yield LocalClaim(Obstacle(held_out=held_out), self.gate)


class LocalClaim:
    def __init__(self, env: Obstacle, gate) -> None:
        self.env, self.gate = env, gate

    async def reset(self, seed: int) -> tuple[Message, ...]:
        self.seed = seed
        return (Message("user", self.env.reset(seed)),)

    async def step(self, action: str) -> Step:
        if (event := self.gate(self.seed)) is not None:
            await event.wait()
        reply = self.env.step(action)
        done = reply["done"] or reply["truncated"]
        return Step((Message("user", reply["messages"]),), reward=reply["reward"], done=done, info=reply["info"])


def demonstrated(run: RobotRunFile) -> ImitationData:
    episodes = []
    for seed in range(run.demonstrations.episodes):
        env = Obstacle()
        seen, done, over = [json.loads(env.reset(seed))[0]], [], False
        while not over:
            done.append(json.loads(player(env, None))[0])
            reply = env.step(json.dumps(done[-1:]))
            seen.append(json.loads(reply["messages"])[0])
            over = reply["done"] or reply["truncated"]
        episodes.append(checked(seen, done, "the expert"))
    return ImitationData.of(episodes, run.control)


def tuner(folder: Path, run: RobotRunFile, steps: int = 5) -> TuningLearner:
    """From a policy that imitated for a few steps."""
    data = demonstrated(run)
    config = LearnerConfig(policy=run.policy, control=run.control, network=run.network, training=run.training)
    learner = ImitationLearner(config, [data], [run.seed])
    learner.train(steps)
    learner.export([folder / "start"], [run.task])
    return TuningLearner(learner_config(run), run.tuning, TrainedPolicy(folder / "start"), data, run.seed)


def exported(learner: TuningLearner, folder: Path) -> TrainedPolicy:
    learner.export([folder / "policy"], ["toy:obstacle"])
    return TrainedPolicy(folder / "policy")


class Kept:
    def __init__(self) -> None:
        self.events: list[object] = []

    def emit(self, event: object) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


class Exploring:
    """The scheduler, with the obstacle in this process and a ledger in memory."""

    def __init__(self, learner: TuningLearner, folder: Path, run: RobotRunFile, pool: LocalPool) -> None:
        exported(learner, folder)
        self.run, self.sink, self.ledger = run, Kept(), SqliteLedger.open(Path(":memory:"))
        self.acting = ActingPolicy(folder / "policy", run.tuning.optimizer_steps)
        self.scheduler = Scheduler(
            tasks=[RolloutTask(TASK.name)],
            schedule=Schedule(alpha=run.tuning.alpha),
            batch_groups=run.tuning.groups,
            group_size=run.tuning.group_size,
            steps=run.tuning.steps,
            runner=RobotRunner(
                environments=pool, acting=self.acting, task=TASK, explore=run.tuning.explore, sink=self.sink
            ),
            engines=self.acting,
            ledger=self.ledger,
            sink=self.sink,
        )

    async def take(self) -> ChunkBatch:
        batch = await self.scheduler.take_batch()
        return chunk_batch(batch, self.ledger, self.run.tuning.advantage, self.acting.policy)

    def advance(self, learner: TuningLearner, folder: Path) -> None:
        """An update that changed nothing."""
        learner.step += self.run.tuning.optimizer_steps
        exported(learner, folder)
        self.acting.announce(Publication(self.acting.serving + 1))


def batch_of(learner: TuningLearner, folder: Path, run: RobotRunFile) -> ChunkBatch:
    async def take() -> ChunkBatch:
        exploring = Exploring(learner, folder, run, LocalPool())
        try:
            return await exploring.take()
        finally:
            await exploring.scheduler.stop()

    return asyncio.run(take())


def test_the_log_probabilities_of_the_choices_are_those_of_the_learner(tmp_path: Path) -> None:
    run = run_file()
    learner = tuner(tmp_path, run)
    first = batch_of(learner, tmp_path, run)
    assert torch.allclose(first.logprobs, torch.tensor(-math.log(4)).expand_as(first.logprobs))
    learner.update(first)
    torch.nn.init.normal_(learner.scorer.leave.weight, std=30.0, generator=torch.Generator().manual_seed(0))
    batch = batch_of(learner, tmp_path, run)
    assert batch.logprobs.std() > 0.01
    now = learner.logprobs(batch.conditions, batch.candidates, batch.chosen)
    assert torch.allclose(now, batch.logprobs, atol=1e-5)
    same = ChunkBatch.decode(batch.encode())
    assert torch.equal(same.candidates, batch.candidates) and torch.equal(same.chosen, batch.chosen)


def test_choices_that_lead_to_success_become_likelier(tmp_path: Path) -> None:
    """A bandit: a candidate succeeds if its first number is positive."""
    run = run_file(imitate=False, optimizer_steps=20, scorer_lr=1e-2)
    learner, generator = tuner(tmp_path, run), torch.Generator().manual_seed(0)
    shares = []
    for _ in range(20):
        conditions, candidates = torch.zeros(128, 2), torch.randn(128, 4, 16, generator=generator)
        with torch.no_grad():
            logprobs = learner.scorer(conditions, candidates).log_softmax(-1)
        chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
        good = (candidates[torch.arange(128), chosen, 0] > 0).float()
        shares.append(good.mean().item())
        learner.update(
            ChunkBatch(
                conditions=conditions,
                candidates=candidates,
                chosen=chosen,
                logprobs=logprobs.gather(-1, chosen[:, None])[:, 0],
                advantages=good - good.mean(),
                sequences=torch.arange(128),
                imitated=torch.zeros(0, 2),
                imitated_chunks=torch.zeros(0, 16),
            )
        )
    assert shares[0] < 0.7 and shares[-1] > 0.85


def test_a_policy_that_is_tuned_starts_as_the_imitated_one_and_acts_by_the_best_candidate(tmp_path: Path) -> None:
    learner = tuner(tmp_path, run_file())
    policy, start = exported(learner, tmp_path), TrainedPolicy(tmp_path / "start")
    noise = torch.randn(3, policy.noise_size, generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(3, 1, 2)
    assert policy.noise_size == 4 * start.noise_size
    assert torch.allclose(policy.act(seen, noise), start.act(seen, noise[:, : start.noise_size]), atol=1e-6)
    torch.nn.init.normal_(policy.scorer.leave.weight, std=30.0, generator=torch.Generator().manual_seed(0))
    proposal = policy.propose(seen, noise)
    best = proposal.candidates[torch.arange(3), proposal.scores.argmax(-1)]
    assert torch.equal(policy.act(seen, noise), policy.commands(best))


def test_successes_are_imitated_and_the_oldest_forgotten(tmp_path: Path) -> None:
    run = run_file(keep=25, optimizer_steps=1)
    learner = tuner(tmp_path, run)
    shown = len(learner.data[0].chunks)
    batch = batch_of(learner, tmp_path, run)
    for value in (1.0, 2.0):
        own = {"imitated": torch.full((20, 2), value), "imitated_chunks": torch.ones(20, 16)}
        learner.update(ChunkBatch(**{**vars(batch), **own}))
    kept = learner._conditions[shown:]
    assert len(kept) == 25 and (kept[:5] == 1).all() and (kept[5:] == 2).all()
    assert torch.equal(learner._conditions[:shown], learner.data[0].conditions)


@pytest.mark.parametrize("explore", [0.0, 0.5])
def test_all_episodes_of_a_group_but_the_first_see_what_is_off(tmp_path: Path, explore: float) -> None:
    run = run_file(explore=explore, group_size=3)
    batch = batch_of(tuner(tmp_path, run), tmp_path, run)
    starts = torch.stack([batch.conditions[batch.sequences == number][0] for number in range(3)])
    different = len({tuple(row.tolist()) for row in starts})
    assert different == (3 if explore else 1)


@pytest.mark.parametrize("best", [0, 1])
def test_of_each_group_the_success_with_the_most_reward_per_step_is_imitated(tmp_path: Path, best: int) -> None:
    run = run_file(explore=0.5)
    exploring = Exploring(tuner(tmp_path, run), tmp_path, run, LocalPool())
    imitated = []

    class AllSucceeded:
        def trajectory(self, id: str) -> Trajectory:
            found = exploring.ledger.trajectory(id)
            rate = float(found.member == best)
            if rate:
                imitated.append(load(found.info["chunks"])["observations"])
            return replace(found, success=True, info={**found.info, "reward_per_step": rate})

    async def take() -> ChunkBatch:
        try:
            batch = await exploring.scheduler.take_batch()
            return chunk_batch(batch, AllSucceeded(), run.tuning.advantage, exploring.acting.policy)
        finally:
            await exploring.scheduler.stop()

    made = asyncio.run(take())
    assert len(imitated) == run.tuning.groups
    assert torch.equal(made.imitated, exploring.acting.policy.scaling.observations(torch.cat(imitated)))


def test_the_learning_rate_of_the_imitation_is_annealed_in_every_update(tmp_path: Path) -> None:
    """A policy that acts in the middle of a schedule is worse than the one that it started from."""
    run = run_file(optimizer_steps=20, steps=3)
    learner = tuner(tmp_path, run)
    batch = batch_of(learner, tmp_path, run)
    for _ in range(2):
        learner.update(batch)
        assert learner.optimizer.param_groups[0]["lr"] < 0.01 * run.tuning.lr
    learner.train(10)
    assert learner.optimizer.param_groups[0]["lr"] > 0.5 * run.tuning.lr


def test_a_resumed_tuning_goes_on_exactly_where_it_was(tmp_path: Path) -> None:
    run = run_file()
    learner = tuner(tmp_path, run)
    batch = batch_of(learner, tmp_path, run)
    learner.update(batch)
    learner.save(tmp_path / "000001")
    learner.update(batch)
    second = tuner(tmp_path / "other", run)
    second.load(tmp_path / "000001")
    second.update(batch)
    for ours, theirs in ((learner.network, second.network), (learner.scorer, second.scorer)):
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert second.step == learner.step and torch.equal(second._chunks, learner._chunks)


def test_a_scorer_that_diverges_stops_the_tuning(tmp_path: Path) -> None:
    run = run_file()
    learner = tuner(tmp_path, run)
    batch = batch_of(learner, tmp_path, run)
    with pytest.raises(DivergedError, match=r"lower tuning\.lr or tuning\.scorer_lr"):
        learner.update(ChunkBatch(**{**vars(batch), "advantages": batch.advantages * math.nan}))


def test_a_group_that_is_too_old_is_dropped_and_counted_and_the_others_do_not_wait_for_it(tmp_path: Path) -> None:
    run = run_file(steps=4, alpha=1)
    learner = tuner(tmp_path, run)

    async def play() -> tuple[Kept, str]:
        never = asyncio.Event()  # the first group hangs in its first chunk

        def gate(seed: int) -> asyncio.Event | None:
            return never if seed == exploring.sink.of(GroupStarted)[0].seed else None

        exploring = Exploring(learner, tmp_path, run, LocalPool(gate))
        for _ in range(3):
            assert len((await exploring.take()).chosen)
            exploring.advance(learner, tmp_path)
        await exploring.scheduler.stop()
        return exploring.sink, exploring.sink.of(GroupStarted)[0].group

    sink, first = asyncio.run(play())
    assert [len(event.ids) for event in sink.of(BatchTaken)] == [2, 2, 2]
    assert all(first not in event.ids for event in sink.of(BatchTaken))
    assert [(event.group, event.reason) for event in sink.of(GroupDropped)] == [(first, "stale")]
    assert all(age <= 1 for event in sink.of(BatchTaken) for age in event.staleness)


def test_no_more_groups_are_started_than_the_bound_allows(tmp_path: Path) -> None:
    run = run_file(steps=3, alpha=0)
    learner = tuner(tmp_path, run)

    async def play() -> list[int]:
        exploring, started = Exploring(learner, tmp_path, run, LocalPool()), []
        for _ in range(3):
            await exploring.take()
            started.append(len(exploring.sink.of(GroupStarted)))  # nothing runs while the policy is trained
            exploring.advance(learner, tmp_path)
        await exploring.scheduler.stop()
        return [*started, len(exploring.sink.of(GroupStarted))]

    assert asyncio.run(play()) == [2, 4, 6, 6]


def test_a_policy_that_is_too_old_waits_for_the_next(tmp_path: Path) -> None:
    run = run_file()
    learner = tuner(tmp_path, run)

    async def play() -> list[int]:
        exploring = Exploring(learner, tmp_path, run, LocalPool())
        acting, steps = exploring.acting, []
        for version in (0, 1):
            acting.require(version)
            noise = torch.zeros(acting.policy.noise_size)
            proposing = asyncio.create_task(acting.propose(torch.zeros(1, 2), noise))
            await asyncio.wait([proposing], timeout=0 if version else 30)
            assert proposing.done() is (version == 0)
            if version:
                exploring.advance(learner, tmp_path)
            steps.append((await proposing)[1])
        return steps

    assert asyncio.run(play()) == [0, 3]


def test_an_environment_that_fails_is_no_failure_of_the_policy(tmp_path: Path) -> None:
    run = run_file(group_size=4)
    learner = tuner(tmp_path, run)

    async def play(broken) -> tuple[ChunkBatch, Kept]:
        exploring = Exploring(learner, tmp_path, run, LocalPool(broken=broken))
        try:
            return await exploring.take(), exploring.sink
        finally:
            await exploring.scheduler.stop()

    batch, sink = asyncio.run(play(lambda claim: claim % 4 == 1))
    assert len(batch.sequences.unique()) == 8  # others are played in place of those that failed
    assert {event.outcome for event in sink.of(TrajectoryEnded) if event.reward is None} >= {"env_failed"}
    with pytest.raises(RollartError, match=r"nothing is left to train on; .*the simulator crashed"):
        asyncio.run(play(lambda claim: True))


def test_the_gain_is_paired_over_the_episodes_that_were_played_both_times() -> None:
    gain = gain_of({1: False, 2: False, 3: True, 4: True}, {1: True, 2: False, 3: True, 5: False})
    assert (gain.before, gain.after) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert gain.mean == pytest.approx(1 / 3) and gain.half == pytest.approx(1.96 / 3)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["tuning.loss=dpo"], "dpo needs a teacher, a reference or pairs, and there are none; use ppo"),
        (["tuning.loss=pppo"], "did you mean 'ppo'?"),
        (["tuning.advantage=gae"], "gae needs turns or tokens; use grpo or rloo"),
        (["tuning.group_size=1"], "tuning.group_size"),
        ([], "holds no run of 'obstacle' to tune; run `rollart robots train` first"),
    ],
)
def test_what_cannot_be_tuned_is_one_sentence(tmp_path: Path, changes: list[str], problem: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: obstacle\ntask: toy:obstacle\n")
    sets = [part for change in changes for part in ("--set", change)]
    result = CliRunner().invoke(app, ["robots", "tune", str(path), "--output", str(tmp_path / "runs"), *sets])
    assert not (tmp_path / "runs").exists()
    assert result.exit_code == 2 and problem in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_what_the_episodes_so_far_depend_on_stays_when_a_tuning_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(loading.dump(run_file()))
    with pytest.raises(RollartError, match=r"was started with tuning\.candidates 4; resume it with the same"):
        asyncio.run(tune(run_file(candidates=2), tmp_path, start=None, on_log=lambda log: None))


@pytest.mark.slow
def test_a_tuning_leaves_its_log_policy_and_gain_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    run, trained, folder = run_file(evaluate_every=2), tmp_path / "trained", tmp_path / "tuned"
    asyncio.run(imitation.train(run, trained, resume=False, on_log=lambda log: None))

    def stop_at_a_checkpoint(log: EventLog) -> None:
        tuning = asyncio.current_task()
        log.subscribe(lambda event: isinstance(event, Checkpointed) and not tuning.cancelling() and tuning.cancel())

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(tune(run, folder, start=trained, on_log=stop_at_a_checkpoint))
    started = next(iter(read_events(folder / "events", RunStarted)))
    assert words_of(started.work).command == "robots tune"
    gain = asyncio.run(tune(run, folder, start=None, on_log=lambda log: None))
    first, second = (event.version for event in read_events(folder / "events", RunStarted))
    assert first == 0 and second in (2, 3)  # an update that is under way when the run is stopped is saved
    assert [event.version for event in read_events(folder / "events", StepDone)] == [1, 2, 3]
    groups = [event.group for event in read_events(folder / "events", GroupStarted)]
    assert len(set(groups)) == len(groups)
    with closing(SqliteLedger.open_readonly(folder / "ledger.sqlite")) as ledger:
        assert ledger.group_states()["consumed"] == 3 * 2
    assert [event.version for event in read_events(folder / "events", Evaluated)] in ([0, 3], [0, 2, 3])
    assert json.loads((folder / "score.json").read_text())["success"] == gain.after
    policy = TrainedPolicy(folder / "policy")
    assert (policy.count, policy.step) == (4, 9)
