"""The adapters that need no package of their own, against real servers in other Pythons: MCP on both ways, OpenEnv."""

import contextlib
import itertools
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollart.envs.adapters import mcp, openenv
from rollart.envs.adapters.mcp_client import McpClient, McpError, McpStdio
from rollart.envs.adapters.websocket import WebSocketLost
from rollart.envs.tools import call_text

HERE = Path(__file__).parent
SHOP = HERE / "shop_server.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A uvicorn server of its own, once it says that it accepts connections."""
    process = subprocess.Popen(command, cwd=HERE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        assert any(b"running on" in line for line in process.stderr), "the server did not start"
        yield process
    finally:
        process.kill()
        process.wait(10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(params=["stdio", "http"])
def shop(request: pytest.FixtureRequest, family: Callable[[str], str]) -> Iterator[mcp.McpTools]:
    python, job = family("bfcl"), "tests.envs.adapters.shop_job:Shop"
    if request.param == "stdio":
        with contextlib.closing(mcp.McpTools(job, command=[python, str(SHOP)])) as env:
            yield env
    else:
        port = free_port()
        with (
            running([python, str(SHOP), str(port)]),
            contextlib.closing(mcp.McpTools(job, url=f"http://127.0.0.1:{port}/mcp")) as env,
        ):
            yield env


def said(step: dict[str, Any]) -> str:
    assert {message["role"] for message in step["messages"]} == {"tool"}
    return "\n".join(message["content"] for message in step["messages"])


def put(asked: str) -> str:
    _, count, item = asked.split()
    return f'I will. {{"name": "put", "arguments": {{"item": "{item}", "count": {count}}}}}'


def test_tools_are_described_called_and_the_job_is_scored(shop: mcp.McpTools) -> None:
    for seed in range(3):
        tools, _, asked = shop.reset(seed)
        assert [tools["role"], [tool["name"] for tool in json.loads(tools["content"])]] == ["tools", ["put", "clear"]]
        assert '"count"' in tools["content"]
        answer = shop.step(put(asked["content"]))
        assert "on the shelf" in said(answer) and not answer["done"]
        second = shop.step("Done.")
        assert shop.step(put(second["messages"]))["reward"] == 0.0
        over = shop.step("Done.")
        assert (over["reward"], over["done"], over["info"]) == (1.0, True, {"success": True, "calls": 2})
    assert shop.reset(0) == shop.reset(0) != shop.reset(1)


def test_wrong_calls_get_a_reply_and_do_not_break_the_episode(shop: mcp.McpTools) -> None:
    shop.reset(0)
    assert "no tool 'steal'" in said(shop.step('{"name": "steal"}'))
    assert "count" in said(shop.step(call_text("put", {"item": "pears"})))
    two = shop.step(call_text("put", {"item": "figs", "count": 2}) + "\n" + call_text("clear", {}))
    assert said(two) == "2 figs on the shelf\nthe shelf is empty"
    shop.step("Done.")
    assert shop.step("Done.")["info"] == {"success": False, "calls": 3}


def test_an_mcp_server_that_is_gone_is_an_error_and_not_an_observation(family: Callable[[str], str]) -> None:
    with pytest.raises(McpError, match="cannot be started"):
        McpStdio(["/no/such/server"])
    with pytest.raises(McpError, match="ended with exit code 3"):
        McpClient(McpStdio([sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)"]))
    silent = McpStdio([sys.executable, "-c", "import sys; sys.stdin.read()"])
    with contextlib.closing(silent), pytest.raises(McpError, match="did not reply in time"):
        McpClient(silent, seconds=0.2)


def test_openenv_sessions_are_played_over_the_websocket(family: Callable[[str], str]) -> None:
    port = free_port()
    command = [family("openenv"), "-m", "uvicorn", "guess_server:app", "--port", str(port)]
    with running(command) as server:
        url = f"http://127.0.0.1:{port}"
        with contextlib.closing(openenv.OpenEnv(url)) as env, contextlib.closing(openenv.OpenEnv(url)) as other:
            assert env.reset(3) == "Guess a number from 1 to 100."
            other.reset(9)
            assert env.step("hm") == {"messages": "Answer with the number, integer.", "reward": 0.0, "done": False}
            assert bisect(env)["info"] == {"success": True}
            other.step("1")
            with pytest.raises(RuntimeError, match="bug of the server"):
                other.step("1001")
            env.reset(3)
            server.kill()
            server.wait(10)
            with pytest.raises(WebSocketLost):
                env.step("1")


def bisect(env: openenv.OpenEnv) -> dict:
    low, high = 1, 100
    for _ in itertools.repeat(None, 7):
        guess = (low + high) // 2
        step = env.step(f"I say {guess}")
        if step["done"]:
            return step
        low, high = (guess + 1, high) if step["messages"] == "higher" else (low, guess - 1)
    raise AssertionError("seven guesses are enough")
