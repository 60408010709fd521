"""RL of an imitated policy: exact log-probabilities, groups on their own clocks, the staleness bound, resume."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rollart.app.cli import app
from rollart.config.robots import RobotRunFile
from rollart.core.errors import EnvironmentFailed, RollartError
from rollart.core.event_log import read_events
from rollart.core.events import BatchTaken, Checkpointed, Evaluated, GroupDropped, GroupStarted, RunStarted, StepDone
from rollart.core.types import Message, Step
from rollart.envs.obstacle import Obstacle, player
from rollart.observe.snapshot import words_of
from rollart.robots import imitation
from rollart.robots.chunks import ImitationData
from rollart.robots.demonstrations import checked
from rollart.robots.exploration import EpisodeGroup, GroupPlayer, chunk_batch
from rollart.robots.learner import DivergedError, ImitationLearner, LearnerConfig, TrainedPolicy
from rollart.robots.suites import robot_task
from rollart.robots.tuning import gain_of, tune
from rollart.robots.tuning_learner import ChunkBatch, TuningLearner, learner_config

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


def group_player(policy: TrainedPolicy, pool: LocalPool, run: RobotRunFile, sink: Kept) -> GroupPlayer:
    return GroupPlayer(policy, pool, TASK, run.tuning, seed=0, parallel=8, version=0, number=0, sink=sink)


def batch_of(learner: TuningLearner, folder: Path, run: RobotRunFile) -> ChunkBatch:
    async def take() -> ChunkBatch:
        acting = group_player(exported(learner, folder), LocalPool(), run, Kept())
        try:
            return chunk_batch(await acting.take(), run.tuning.advantage, acting.policy)
        finally:
            await acting.close()

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
    run, sink = run_file(steps=4, alpha=1), Kept()
    policy = exported(tuner(tmp_path, run), tmp_path)

    async def play() -> list[list[EpisodeGroup]]:
        never = asyncio.Event()  # the first group hangs in its first chunk

        def gate(seed: int) -> asyncio.Event | None:
            return never if seed == sink.of(GroupStarted)[0].seed else None

        acting = group_player(policy, LocalPool(gate), run, sink)
        taken = []
        for version in range(1, 4):
            taken.append(await acting.take())
            policy.step = version * run.tuning.optimizer_steps
            acting.advance(policy)
        await acting.close()
        return taken

    taken = asyncio.run(play())
    assert [len(groups) for groups in taken] == [2, 2, 2]
    assert all(group.number != 0 for groups in taken for group in groups)
    assert [(event.group, event.reason) for event in sink.of(GroupDropped)] == [("g0", "stale")]
    assert all(age <= 1 for event in sink.of(BatchTaken) for age in event.staleness)


def test_no_more_groups_are_started_than_the_bound_allows(tmp_path: Path) -> None:
    run, sink = run_file(steps=3, alpha=0), Kept()
    policy = exported(tuner(tmp_path, run), tmp_path)

    async def play() -> list[int]:
        acting, started = group_player(policy, LocalPool(), run, sink), []
        while acting.version < 3:
            await acting.take()
            started.append(len(sink.of(GroupStarted)))  # nothing runs while the policy is trained
            acting.advance(policy)
        await acting.close()
        return [*started, len(sink.of(GroupStarted))]

    assert asyncio.run(play()) == [2, 4, 6, 6]


def test_an_environment_that_fails_is_no_failure_of_the_policy(tmp_path: Path) -> None:
    run, sink = run_file(group_size=4), Kept()
    policy = exported(tuner(tmp_path, run), tmp_path)

    async def play(broken) -> list[EpisodeGroup]:
        acting = group_player(policy, LocalPool(broken=broken), run, sink)
        try:
            return await acting.take()
        finally:
            await acting.close()

    groups = asyncio.run(play(lambda claim: claim % 4 == 1))
    assert [len(group.played) for group in groups] == [3, 3]
    with pytest.raises(RollartError, match="4 groups of toy-obstacle could not be played; the simulator crashed"):
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


@pytest.mark.slow
def test_a_tuning_leaves_its_log_policy_and_gain_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    run, trained, folder = run_file(evaluate_every=2), tmp_path / "trained", tmp_path / "tuned"
    asyncio.run(imitation.train(run, trained, resume=False, on_log=lambda log: None))

    def stop(event: object) -> None:
        if isinstance(event, Checkpointed):
            asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(tune(run, folder, start=trained, on_log=lambda log: log.subscribe(stop)))
    started = next(iter(read_events(folder / "events", RunStarted)))
    assert words_of(started.work).command == "robots tune"
    gain = asyncio.run(tune(run, folder, start=None, on_log=lambda log: None))
    assert [event.version for event in read_events(folder / "events", RunStarted)] == [0, 2]
    assert [event.version for event in read_events(folder / "events", StepDone)] == [1, 2, 3]
    groups = [event.group for event in read_events(folder / "events", GroupStarted)]
    assert len(set(groups)) == len(groups)
    assert [event.version for event in read_events(folder / "events", Evaluated)] in ([0, 3], [0, 2, 3])
    assert json.loads((folder / "score.json").read_text())["success"] == gain.after
    policy = TrainedPolicy(folder / "policy")
    assert (policy.count, policy.step) == (4, 9)
