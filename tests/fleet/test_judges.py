"""Judges and opponents from pools: started by the first request, ended when idle, named by their pool."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import rollart
from rollart.config import RunFile, TinyModelConfig
from rollart.core.errors import ConfigError, ServiceError
from rollart.core.events import Placed, ServiceEnded, ServiceStarted, StepDone
from rollart.core.llm_client import NoReply, ask
from rollart.core.types import Episode
from rollart.fleet.fleet import placement_plan
from rollart.fleet.judges import Judges, with_judges
from rollart.launch.local import LocalLauncher
from rollart.models import tiny
from rollart.rewards.invokers import Rewards

TASK = {"name": "sums", "env": "rollart.envs.addition:Addition", "max_context": 64, "sampling": {"max_tokens": 6}}
MODEL = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "context": 256}


def asked_lengths(episodes: list[Episode], url: str, model: str, extra: float) -> list[float]:
    """What the judge says of each attempt is noise; that it answers is the point."""
    said = [
        ask(url, model, [{"role": "user", "content": f"Judge {each.id}."}], options={"max_tokens": 4}, whole=False)
        for each in episodes
    ]
    return [extra + len(text) for text in said]


asked_lengths.batch = True  # type: ignore[attr-defined]


class Duel:
    """Its opponent always replies; what it says is noise."""

    def __init__(self, opponent: str, opponent_args: dict[str, str]) -> None:
        self.opponent = opponent_args

    def reset(self, seed: int) -> str:
        return f"{seed}?"

    def step(self, action: str) -> tuple[str, float, bool]:
        said = [{"role": "user", "content": action or "nothing"}]
        ask(self.opponent["url"], self.opponent["model"], said, options={"max_tokens": 3}, whole=False)
        return "", float(len(action)), True

    def close(self) -> None: ...


def run_file(**more: Any) -> RunFile:
    plain: dict[str, Any] = {
        "model": {"tiny": MODEL},
        "tasks": [TASK],
        "pools": {"grader": {"role": "judge", "model": "folder"}},
        "evaluation": {"every": 0, "final_episodes": 2, "samples": 2},
    }
    return RunFile.model_validate({**plain, **more})


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"tasks": [{**TASK, "reward": {"function": "judge", "pool": "greater"}}]}, "did you mean 'grader'"),
        ({"tasks": [{**TASK, "opponent": "x"}], "pools": {}}, "no pool 'x' of role judge; it has none"),
        ({"pools": {"grader": {"role": "judge"}}}, "a judge needs `model`"),
        ({"pools": {"g": {"role": "teacher", "model": "m", "idle": 3.0}}}, "`idle` is for pools of role judge"),
        ({"pools": {"g": {"role": "teacher", "model": "m", "engine": "vllm"}}}, "`engine` is for pools of role gener"),
        (
            {
                "tasks": [{**TASK, "opponent": "grader"}],
                "pools": {
                    "grader": {"role": "judge", "model": "folder"},
                    "far": {"role": "environment", "device": "cpu", "urls": ["tcp://far:1"]},
                },
            },
            "pool 'far' are run by someone else and cannot reach the opponent: give pool 'grader' `urls`",
        ),
        (
            {"tasks": [{**TASK, "reward": {"function": "judge", "pool": "grader", "args": {"url": "http://a/v1"}}}]},
            "the pool gives the function `url`",
        ),
        (
            {"tasks": [{**TASK, "reward": {"function": "pairwise", "invoker": "http", "url": "http://a"}}]},
            "a reward of groups runs in local processes",
        ),
    ],
)
def test_a_mistake_is_a_sentence(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        run_file(**more)


def test_rewards_and_environments_get_the_addresses_of_their_pools() -> None:
    task = {
        **TASK,
        "reward": {"function": "pairwise", "pool": "grader", "args": {"opponents": 2}},
        "opponent": "grader",
    }
    (given,) = run_file(tasks=[task]).tasks
    with pytest.raises(ConfigError, match="the opponent of task sums is a pool, which a run starts"):
        _ = given.env_args
    with pytest.raises(ConfigError, match="the reward of task sums is judged by a pool, which a run starts"):
        Rewards([given], run_file().rewards)
    found = with_judges(given, {"grader": ("http://here/v1", "grader")})
    assert found.reward.args == {"opponents": 2, "url": "http://here/v1", "model": "grader"} and found.reward.of_group
    assert found.env_args["opponent_args"] == {"url": "http://here/v1", "model": "grader"}
    assert found.env_args["opponent"].endswith(":Served")


class Sink:
    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.roles: list[str] = []

    def emit(self, event: Any) -> None:
        if isinstance(event, ServiceStarted):
            self.roles.append(event.role)
        if isinstance(event, ServiceEnded) and event.reason.startswith("idle"):
            self.ended.set()


@pytest.mark.slow
def test_a_judge_ends_when_it_is_idle_and_is_started_by_the_next_request(tmp_path: Path) -> None:
    model = tiny.make(TinyModelConfig(**MODEL), tmp_path / "model", seed=5)

    async def run() -> list[str]:
        config = run_file(pools={"grader": {"role": "judge", "model": str(model), "idle": 0.01}})
        launcher, sink = LocalLauncher(), Sink()
        placed = await placement_plan(config, launcher)
        bindings = [binding for binding in placed.bindings if binding.role == "judge"]
        judges = Judges(config, bindings, launcher=launcher, logs=tmp_path, sink=sink)
        try:
            await judges.start()
            url, name = judges.addresses["grader"]
            assert sink.roles == [], "nobody has asked yet"
            messages = [{"role": "user", "content": "Well?"}]
            for _ in range(2):
                sink.ended.clear()
                await asyncio.to_thread(ask, url, name, messages, options={"max_tokens": 3}, whole=False)
                async with asyncio.timeout(60):
                    await sink.ended.wait()
            with pytest.raises(NoReply, match="HTTP 401"):
                await asyncio.to_thread(ask, url.replace("/k/", "/k/not"), name, messages)
            return sink.roles
        finally:
            await judges.close()
            await launcher.close()

    assert asyncio.run(run()) == ["judge", "judge"]


@pytest.mark.slow
def test_a_run_starts_the_judge_of_its_groups(tmp_path: Path) -> None:
    model = tiny.make(TinyModelConfig(**MODEL), tmp_path / "model", seed=5)
    reward = {"function": "test_judges:asked_lengths", "pool": "grader", "group": True, "args": {"extra": 1.0}}
    run = run_file(
        tasks=[{**TASK, "reward": reward}],
        pools={"grader": {"role": "judge", "model": str(model)}},
        training={"steps": 1, "batch_groups": 2, "group_size": 3},
    )
    trained = rollart.train(run, folder=tmp_path / "run")
    assert [step.version for step in trained.events(StepDone)] == [1]
    assert [event.role for event in trained.events(ServiceStarted)].count("judge") == 1
    assert all(each.reward is not None and each.reward >= 1.0 for each in trained.trajectories() if each.reward)
    assert {each.outcome for each in trained.trajectories(held_out=True)} <= {"finished", "truncated"}
    assert "/k/" not in (tmp_path / "run" / "run.yaml").read_text(), "keys stay in memory"


@pytest.mark.slow
def test_environments_on_a_cluster_play_against_an_opponent_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    model = tiny.make(TinyModelConfig(**MODEL), tmp_path / "model", seed=5)
    node = {"object_store_memory": 80_000_000, "include_dashboard": False, "num_cpus": 8}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        run = run_file(
            cluster=cluster.address,
            tasks=[{**TASK, "env": "test_judges:Duel", "opponent": "rival"}],
            pools={"rival": {"role": "judge", "model": str(model), "device": "cpu"}},
            training={"steps": 1, "batch_groups": 2, "group_size": 2},
        )
        trained = rollart.train(run, folder=tmp_path / "run")
    finally:
        cluster.shutdown()
    assert [step.version for step in trained.events(StepDone)] == [1]
    assert [event.node for event in trained.events(Placed) if event.role == "judge"] != []
    played = [*trained.trajectories(), *trained.trajectories(held_out=True)]
    assert {each.outcome for each in played} <= {"finished", "truncated"} and len(played) >= 8


class Unreachable(LocalLauncher):
    """A controller that other nodes cannot connect to."""

    async def own_address(self) -> str:
        raise ServiceError("nobody gets here")


def test_only_opponents_need_a_controller_that_other_nodes_reach(tmp_path: Path) -> None:
    model = tiny.make(TinyModelConfig(**MODEL), tmp_path / "model", seed=5)

    async def url(task: dict[str, Any]) -> str:
        config = run_file(tasks=[task], pools={"grader": {"role": "judge", "model": str(model)}})
        launcher = Unreachable()
        placed = await placement_plan(config, launcher)
        bindings = [binding for binding in placed.bindings if binding.role == "judge"]
        judges = Judges(config, bindings, launcher=launcher, logs=tmp_path, sink=Sink())
        try:
            await judges.start()
            return judges.addresses["grader"][0]
        finally:
            await judges.close()
            await launcher.close()

    judged = {**TASK, "reward": {"function": "judge", "pool": "grader"}}
    assert asyncio.run(url(judged)).startswith("http://127.0.0.1:"), "rewards are computed beside the controller"
    with pytest.raises(ServiceError, match="nobody gets here"):
        asyncio.run(url({**TASK, "opponent": "grader"}))


def test_a_controller_outside_of_the_cluster_says_that_nodes_cannot_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from rollart.launch.ray import RayLauncher

    async def joined(self: RayLauncher) -> list[Any]:
        return []

    monkeypatch.setattr(RayLauncher, "_nodes", joined)
    with pytest.raises(ServiceError, match="start the run on a node of the cluster"):
        asyncio.run(RayLauncher("ray://head:10001").own_address())
