"""Runs of imitation, from recording to evaluation, on the task that needs no simulator."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from rollart.app.cli import app
from rollart.config.robots import ComparisonFile, RobotRunFile, two_processes
from rollart.core.errors import ConfigError, EnvironmentFailed, RollartError
from rollart.core.event_log import read_events
from rollart.core.events import Checkpointed, Evaluated, RunEnded, RunStarted, WarmupStep
from rollart.core.types import Message, Step
from rollart.robots import comparison, imitation
from rollart.robots import record as recording
from rollart.robots.chunks import ImitationData
from rollart.robots.demonstrations import Demonstration
from rollart.robots.episodes import PolicyDiverged, evaluate
from rollart.robots.learner import ImitationLearner, LearnerConfig, TrainedPolicy
from rollart.robots.record import record
from rollart.robots.suites import robot_task

TASK = robot_task("toy:obstacle")
SMALL = {
    "task": "toy:obstacle",
    "policy": "regression",
    "demonstrations": {"episodes": 4},
    "control": {"history": 1, "chunk": 8, "execute": 8},
    "network": {"width": 16, "layers": 1},
    "training": {"steps": 60, "batch": 16, "lr_warmup": 5, "checkpoint_every": 20},
    "evaluation": {"episodes": 4, "every": 40, "quick": 2},
}


def run_file(**changes: object) -> RobotRunFile:
    return RobotRunFile.model_validate({**SMALL, **changes})


def untrained(path: Path) -> TrainedPolicy:
    run = run_file()
    config = LearnerConfig(policy=run.policy, control=run.control, network=run.network, training=run.training)
    shown = Demonstration(np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32), np.eye(20, 2, dtype="f"))
    ImitationLearner(config, [ImitationData.of([shown], run.control)], [0]).export([path], ["toy:obstacle"])
    return TrainedPolicy(path)


class ScriptedPool:
    """Environments in this process: the episode of every second claim breaks; the others succeed after two chunks."""

    def __init__(self, observations: int = 2, *, broken: bool = True) -> None:
        self.claims, self.waiting, self.most = 0, 0, 0
        self.observations, self.broken = observations, broken

    @asynccontextmanager
    async def claim(self, task: str, held_out: bool) -> AsyncIterator["ScriptedPool"]:
        assert held_out
        self.claims += 1
        if self.broken and self.claims % 2:
            raise EnvironmentFailed("the simulator crashed")
        self.steps = 0
        yield self

    async def reset(self, seed: int) -> tuple[Message, ...]:
        return (Message("user", json.dumps([[0.0] * self.observations])),)

    async def step(self, action: str) -> Step:
        self.steps += len(json.loads(action))
        info = {"success": True, "steps": self.steps}
        return Step((Message("user", "[[0.0, 0.0]]"),), reward=1.0, done=self.steps >= 16, info=info)


def test_an_environment_that_fails_is_not_a_failure_of_the_policy(tmp_path: Path) -> None:
    policy = untrained(tmp_path / "policy")
    score = asyncio.run(evaluate(policy, ScriptedPool(), TASK, episodes=6, seed=0, parallel=1))
    assert (len(score.played), score.success, len(score.episodes)) == (3, 1.0, 6)
    assert score.episodes[0].failure == "the simulator crashed"


def test_an_evaluation_of_which_nothing_could_be_played_is_an_error(tmp_path: Path) -> None:
    policy = untrained(tmp_path / "policy")
    with pytest.raises(RollartError, match="no episode of toy-obstacle could be played; the last: the simulator"):
        asyncio.run(evaluate(policy, ScriptedPool(), TASK, episodes=1, seed=0, parallel=1))


def test_actions_that_are_not_finite_never_reach_an_environment(tmp_path: Path) -> None:
    policy, pool = untrained(tmp_path / "policy"), ScriptedPool(broken=False)
    with torch.no_grad():
        policy.network.leave.bias.fill_(torch.nan)
    with pytest.raises(PolicyDiverged, match="are not finite numbers; train it again"):
        asyncio.run(evaluate(policy, pool, TASK, episodes=2, seed=0, parallel=2))
    assert pool.steps == 0


def test_a_task_of_another_size_is_refused(tmp_path: Path) -> None:
    policy = untrained(tmp_path / "policy")
    with pytest.raises(RollartError, match="observes 5 numbers, but the policy of toy:obstacle knows 2"):
        asyncio.run(evaluate(policy, ScriptedPool(5, broken=False), TASK, episodes=1, seed=0, parallel=1))


def test_the_others_do_not_go_on_for_a_slow_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    @asynccontextmanager
    async def no_environment(task: object, config: object) -> AsyncIterator[None]:
        yield

    async def recorded() -> list[int]:
        enough = asyncio.Event()

        async def episode(env: None, name: str, seed: int, deadline: float) -> Demonstration:
            begun.append(seed)
            if len(begun) == 1:
                await enough.wait()
            return Demonstration(np.zeros((1, 2)), np.full((1, 2), seed))

        monkeypatch.setattr(recording, "single_environment", no_environment)
        monkeypatch.setattr(recording, "_episode", episode)
        found = await record(
            "toy:obstacle", 4, 0, config=two_processes(), on_progress=lambda done: done == 4 and enough.set()
        )
        return [int(one.actions[0, 0]) for one in found.demonstrations]

    assert asyncio.run(recorded()) == begun[:4] and len(begun) == 5


@pytest.mark.slow
def test_the_same_seed_records_the_same_episodes_whatever_the_processes() -> None:
    one, two = (
        asyncio.run(
            record("toy:obstacle", 5, 7, config=two_processes().model_copy(update={"processes": count}))
        ).demonstrations
        for count in (1, 2)
    )
    assert len(one) == 5
    assert all(np.array_equal(a.actions, b.actions) for a, b in zip(one, two, strict=True))


@pytest.mark.slow
def test_a_run_leaves_its_log_policy_and_score_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    asyncio.run(imitation.train(run_file(), straight, resume=False, on_log=lambda log: None))
    kinds = [type(event) for event in read_events(straight / "events")]
    assert kinds[0] is RunStarted and kinds[-1] is RunEnded
    assert kinds.count(Checkpointed) == 3 and kinds.count(Evaluated) == 2 and WarmupStep in kinds
    assert json.loads((straight / "score.json").read_text())["episodes"] == 4

    half = run_file(training={**SMALL["training"], "steps": 60, "checkpoint_every": 40})
    cut.mkdir()
    (cut / "demonstrations.npz").write_bytes((straight / "demonstrations.npz").read_bytes())

    def stop(event: object) -> None:
        if isinstance(event, Checkpointed):
            asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(imitation.train(half, cut, resume=False, on_log=lambda log: log.subscribe(stop)))
    asyncio.run(imitation.train(half, cut, resume=True, on_log=lambda log: None))
    assert [event.version for event in read_events(cut / "events", RunStarted)] == [0, 40]
    ours, theirs = (TrainedPolicy(folder / "policy").network.state_dict() for folder in (straight, cut))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


PLAN = comparison.ComparisonFile.model_validate(
    {
        **{key: SMALL[key] for key in ("demonstrations", "control", "network", "training")},
        "evaluation": {"episodes": 2},
        "tasks": ["toy:obstacle"],
        "policies": {"mean": "regression", "fast": "meanflow"},
        "seeds": 2,
    }
)


def test_a_comparison_whose_time_is_up_begins_nothing(tmp_path: Path) -> None:
    assert asyncio.run(comparison.compare(PLAN, tmp_path, lambda one: None, seconds=0.0)) == []
    assert not (tmp_path / "demonstrations").exists() and not (tmp_path / "logs").exists()


def test_a_comparison_of_which_all_is_done_needs_no_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLART_ENVS", str(tmp_path / "none"))
    plan = PLAN.model_copy(update={"tasks": ["adroit:pen"], "policies": {"mean": PLAN.policies["mean"]}, "seeds": 1})
    done = comparison.ComparedPolicy("mean", "adroit:pen", 0, 0.5, 2, 0, 1.0, 2.0, 3.0)
    (tmp_path / comparison.RESULTS).write_bytes(msgspec.json.encode(done) + b"\n")
    assert asyncio.run(comparison.compare(plan, tmp_path, lambda one: None)) == [done]


@pytest.mark.slow
def test_a_comparison_trains_stacks_and_does_only_what_is_missing(tmp_path: Path) -> None:
    seen: list[comparison.ComparedPolicy] = []
    results = asyncio.run(comparison.compare(PLAN, tmp_path, seen.append))
    assert all(one.step_ms > 0 for one in results)
    assert {(one.policy, one.seed) for one in results} == {(name, seed) for name in ("mean", "fast") for seed in (0, 1)}
    lines = (tmp_path / comparison.RESULTS).read_text().splitlines(keepends=True)
    (tmp_path / comparison.RESULTS).write_text("".join(lines[1:]))
    seen.clear()
    asyncio.run(comparison.compare(PLAN, tmp_path, seen.append))
    assert len(seen) == 1


def test_a_task_without_an_expert_asks_for_files() -> None:
    with pytest.raises(ConfigError, match=r"adroit:door has no scripted expert; name recorded files"):
        asyncio.run(record("adroit:door", 1, 0, config=two_processes()))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ("task: metaworld:pick-plase-v3", "has no task 'pick-plase-v3'; did you mean 'pick-place-v3'?"),
        ("task: walk", "a robot task is `suite:task`"),
        ("task: toy:obstacle\ncontrol: {observation: points}", "the suite toy shows no point clouds"),
        ("task: toy:obstacle\ncontrol: {chunk: 4, execute: 8}", "execute must be at most chunk, which is 4"),
        ("task: toy:obstacle\npolicy: {name: meanflow, cosin: 1}", "did you mean 'cosine'?"),
        ("task: toy:obstacle\npolicy: meanflw", "policy"),
        ("task: toy:obstacle\npolicy: {name: ddim, steps: 200}", "steps must be at most noise_levels"),
    ],
)
def test_a_bad_run_file_is_one_sentence(tmp_path: Path, changes: str, problem: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(changes)
    result = CliRunner().invoke(app, ["robots", "train", str(path), "--output", str(tmp_path)])
    assert result.exit_code == 2 and problem in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ("task: toy:obstacle\ndemonstrations: {path: FILE, episodes: 1}", "have observations of 5 and actions of 2"),
        ("task: adroit:door", "adroit:door has no scripted expert; name recorded files"),
    ],
)
def test_demonstrations_that_cannot_be_used_leave_no_run_folder(tmp_path: Path, changes: str, problem: str) -> None:
    path, file, output = tmp_path / "run.yaml", tmp_path / "of another task.npz", tmp_path / "runs"
    np.savez(file, observations=np.zeros((9, 5)), actions=np.zeros((9, 2)))
    path.write_text(changes.replace("FILE", json.dumps(str(file))))
    result = CliRunner().invoke(app, ["robots", "train", str(path), "--output", str(output)])
    assert result.exit_code == 2 and problem in " ".join(result.output.split())
    assert not output.exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["robots", "eval", str(tmp_path)])
    assert result.exit_code == 2 and "is not a run folder of `rollart robots train`" in result.output


def test_tasks_come_before_seeds_and_those_with_few_of_their_sizes_fill_a_stack_with_seeds() -> None:
    tasks = ["metaworld:reach-v3", "adroit:pen", "metaworld:push-v3"]
    plan = ComparisonFile.model_validate({"tasks": tasks, "policies": {"a": "flow"}, "seeds": 3, "stack": 2})
    reach, pen, push = tasks
    assert list(comparison._rounds(plan)) == [
        [(reach, 0), (push, 0)],
        [(pen, 0), (pen, 1)],
        [(reach, 1), (push, 1)],
        [(reach, 2), (push, 2)],
        [(pen, 2)],
    ]
