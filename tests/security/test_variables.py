"""Foreign code looks for the secrets of the controller in its environment variables."""

import asyncio
import json
import os
from pathlib import Path

import pytest
import yaml

from rollart.agents.pool import host_spec as agent_host
from rollart.config import EnvironmentsConfig, ProcessLimitsConfig, RewardsConfig, RunFile, TaskConfig
from rollart.core.errors import RewardFailed, ServiceError
from rollart.core.types import Episode
from rollart.envs.adapters.mcp import _filled
from rollart.envs.single import single_environment
from rollart.rewards.pool import RewardPool
from rollart.workers.pool import ProcessPool

SECRETS = ("AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "ROLLART_ENGINE_KEY", "ROLLART_REWARD_SECRET", "HF_TOKEN")


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, f"the value of {name}")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:password@proxy")


def task(**more: object) -> TaskConfig:
    return TaskConfig.model_validate({"name": "t", "env": "attackers:Thief", **more})


async def stolen(task: TaskConfig) -> str:
    async with single_environment(task, EnvironmentsConfig()) as environment:
        [message] = await environment.reset(0, held_out=False)
        return message.content


def test_an_environment_and_what_it_starts_see_only_harmless_variables_and_those_of_pass_env() -> None:
    loot = json.loads(asyncio.run(stolen(task(pass_env=["OPENAI_API_KEY"]))))
    assert loot["OPENAI_API_KEY"] == "the value of OPENAI_API_KEY"
    assert "password" not in str(loot) and str(loot).count("the value of") == 1
    assert loot["PATH"] == os.environ["PATH"]


def test_a_reward_function_sees_only_what_its_own_section_names() -> None:
    async def body() -> None:
        reward = {"function": "attackers:stealing_reward", "pass_env": ["HF_TOKEN"]}
        pool = RewardPool([task(reward=reward)], RewardsConfig(retries=0))
        try:
            await pool.score("t", Episode("e", "t", 0, ()))
        finally:
            await pool.close()

    with pytest.raises(RewardFailed, match="the value of HF_TOKEN") as raised:
        asyncio.run(body())
    assert str(raised.value).count("the value of") == 1


def test_a_function_agent_sees_no_secret() -> None:
    spec = agent_host(
        TaskConfig.model_validate({"name": "t", "agent": "attackers:stealing_agent"}), ProcessLimitsConfig()
    )

    async def body() -> object:
        pool = ProcessPool(spec, 1)
        endpoint = {"url": "http://127.0.0.1:1", "key": "own"}
        episode = {"id": "e", "task": "t", "seed": 0}
        args = {"agent": "attackers:stealing_agent", "endpoint": endpoint, "episode": episode}
        try:
            async with pool.claim() as claim:
                await claim.acquire()
                return (await claim.call("run", args, 30.0))["info"]
        finally:
            await pool.close()

    loot = str(asyncio.run(body()))
    assert "the value of" not in loot and "'OPENAI_API_KEY': 'own'" in loot


@pytest.mark.slow
def test_the_child_that_plays_demonstrations_has_no_secret(tmp_path: Path) -> None:
    from rollart.warmup.prepare import prepare_in_child

    spy = tmp_path / "spy_env.py"
    spy.write_text(
        "import json, os, pathlib\n"
        "class Spy:\n"
        f"    def reset(self, seed): pathlib.Path({str(tmp_path / 'loot')!r}).write_text(str(dict(os.environ)))\n"
        "    step = close = None\n"
        "def play(env, rng): return ''\n"
    )
    warmup = {"demonstrations": 1}
    run = RunFile.model_validate(
        {
            "model": {"tiny": {}, "warmup": warmup},
            "tasks": [{"name": "t", "env": "spy_env:Spy", "player": "spy_env:play"}],
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        with pytest.raises(Exception, match=r"NoneType|reset|object"):
            asyncio.run(prepare_in_child(run, tmp_path / "m", tmp_path / "e", log=tmp_path / "log"))
    assert "the value of" not in (tmp_path / "loot").read_text()


def test_a_variable_that_is_not_set_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ServiceError, match="`pass_env` names HF_TOKEN, which is not set on this machine"):
        asyncio.run(stolen(task(pass_env=["HF_TOKEN"])))


def test_a_run_file_has_the_names_of_secrets_and_never_their_values() -> None:
    run = RunFile.model_validate({"model": {"tiny": {}}, "tasks": [task(pass_env=["HF_TOKEN"]).model_dump()]})
    text = yaml.safe_dump(run.model_dump(mode="json"))
    assert "HF_TOKEN" in text and "the value of" not in text


def test_headers_of_an_mcp_server_name_a_variable_in_place_of_its_value() -> None:
    assert _filled({"Authorization": "Bearer $HF_TOKEN"}) == {"Authorization": "Bearer the value of HF_TOKEN"}
    with pytest.raises(ValueError, match=r"\$MISSING is not set here; name it in the task's `pass_env`"):
        _filled({"Authorization": "Bearer $MISSING"})
