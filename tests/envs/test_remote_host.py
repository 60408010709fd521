"""Environments in a host that someone else runs: a real second process, reached through its port."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

from rollart.app import preflight
from rollart.config import EnvironmentsConfig, PoolConfig, TaskConfig
from rollart.core.errors import ConfigError, EnvironmentFailed, ServiceError
from rollart.envs.pool import EnvironmentPool
from rollart.envs.remote_host import KEY
from rollart.workers import pool as process_pool

SERVE = [str(Path(sys.executable).with_name("rollart")), "envs", "serve", "--port", "0"]
QUICK = EnvironmentsConfig(processes=2, retries=0)


@contextmanager
def serving(*arguments):
    environment = os.environ | {KEY: "secret"}
    host = subprocess.Popen(
        [*SERVE, *arguments], cwd=Path(__file__).parent, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        yield host, host.stdout.readline().split()[-1]
    finally:
        host.terminate()
        host.wait(timeout=30)
        host.stdout.close()


@asynccontextmanager
async def pool(url, env="Plain"):
    environments = EnvironmentPool([TaskConfig(name="t", env=f"hostile_envs:{env}")], QUICK, urls=[url])
    try:
        async with asyncio.timeout(60):
            await environments.start()
            yield environments
    finally:
        await environments.close()


def test_episodes_run_in_the_remote_host_and_leave_nothing_behind(monkeypatch):
    monkeypatch.setenv(KEY, "secret")

    async def run(host, url):
        async with pool(url) as environments, environments.claim("t", held_out=False) as environment:
            await environment.reset(1)
            pid = int((await environment.step("who")).messages[0].content.split()[0])
            return psutil.Process(pid).ppid()

    with serving("--import", "hostile_envs:Plain") as (host, url):
        for _ in range(2):  # a host serves one run after the other
            assert asyncio.run(run(host, url)) == host.pid
        asyncio.run(nobody_left(host))


async def nobody_left(host):
    async with asyncio.timeout(30):
        while psutil.Process(host.pid).children(recursive=True):  # noqa: ASYNC110 (state without an event of its own)
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("key", "env", "reason"),
    [
        ("wrong", "Plain", f"closed the connection; is {KEY} its key"),
        ("", "Plain", f"set {KEY} to the key of the host at tcp://"),
        ("secret", "Missing", "cannot import it: AttributeError"),
    ],
)
def test_a_host_that_cannot_be_used_says_why(monkeypatch, key, env, reason):
    monkeypatch.setenv(KEY, key)

    async def run(url):
        with pytest.raises(ServiceError, match=reason):
            async with pool(url, env):
                pass

    with serving() as (_, url):
        asyncio.run(run(url))


def test_a_host_that_is_gone_and_an_invalid_address_are_errors(monkeypatch):
    monkeypatch.setenv(KEY, "secret")

    async def run(url):
        with pytest.raises(ServiceError, match="cannot be reached"):
            async with pool(url):
                pass
        with pytest.raises(ServiceError, match="write tcp://HOST:PORT"):
            async with pool("http://nowhere"):
                pass

    with serving() as (_, url):
        pass
    asyncio.run(run(url))


def test_a_lost_host_fails_its_episodes_and_ends_the_run_if_it_does_not_come_back(monkeypatch):
    monkeypatch.setenv(KEY, "secret")
    monkeypatch.setattr(process_pool, "BACKOFF_S", 0.001)

    async def run(host, url):
        async with pool(url) as environments, environments.claim("t", held_out=False) as environment:
            await environment.reset(1)
            host.send_signal(signal.SIGKILL)
            with pytest.raises(EnvironmentFailed):
                while True:
                    await environment.step("who")
            with pytest.raises(ServiceError, match="no host of t environments is left"):
                await environments.watch()

    with serving() as (host, url):
        asyncio.run(run(host, url))


def test_a_host_without_a_key_does_not_start():
    environment = {name: value for name, value in os.environ.items() if name != KEY}
    ended = subprocess.run(SERVE, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"set {KEY}" in ended.stderr


def test_a_family_of_a_remote_host_need_not_be_installed_here(monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLART_ENVS", str(tmp_path))
    task = TaskConfig(name="t", env="hostile_envs:Plain", family="textarena")
    with pytest.raises(ConfigError, match="rollart envs add textarena"):
        EnvironmentPool([task], QUICK)
    EnvironmentPool([task], QUICK, urls=["tcp://10.0.0.7:7070"])
    text = "model: {path: MODEL}\ntasks: [{name: t, env: 'a.b:C', family: textarena}]\n"
    hosts = "pools: {far: {role: environment, device: cpu, urls: ['tcp://10.0.0.7:7070']}}\n"
    for name, content in (("here", text), ("there", text + hosts)):
        (tmp_path / f"{name}.yaml").write_text(content.replace("MODEL", str(tmp_path)))
    with pytest.raises(ConfigError, match="rollart envs add textarena"):
        preflight.load_run(tmp_path / "here.yaml", need_model=False)
    preflight.load_run(tmp_path / "there.yaml", need_model=False)


def test_a_pool_of_environments_may_have_urls_and_one_of_trainers_may_not():
    assert PoolConfig(role="environment", device="cpu", urls=["tcp://a:1"]).workers == 1
    with pytest.raises(ValueError, match="not train"):
        PoolConfig(role="train", device="cpu", urls=["tcp://a:1"])
