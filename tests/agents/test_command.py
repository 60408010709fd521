"""Any program as an agent: in a sandbox, with the gateway as its only network."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollart.agents.command import CommandAgent
from rollart.agents.pool import AgentPool, driver_of
from rollart.app import preflight
from rollart.config import TaskConfig
from rollart.core.errors import ConfigError, EnvironmentFailed, RewardFailed, RollartError
from rollart.core.events import AnyEvent
from rollart.core.protocols import TokenStream
from rollart.core.types import Completion, GenerationRequest, Step
from rollart.gateway.client import Gateway
from rollart.gateway.template import ChatTemplate
from rollart.launch.local import LocalLauncher
from rollart.models import tiny
from tests.gateway.gateways import KEY, Policy, Running, gateway, tiny_template

sandboxed = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
EPISODE = {"id": "episode", "task": "t", "seed": 7, "held_out": False, "args": {"word": "seven"}}
ASK = """
import json, os, urllib.request
episode = json.loads(os.environ["ROLLART_EPISODE"])
asked = {"model": "any", "messages": [{"role": "user", "content": episode["args"]["word"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
answer = json.load(urllib.request.urlopen(request, timeout=30))
print(answer["choices"][0]["message"]["content"])
"""


def play(tmp_path: Path, agent: dict[str, Any], say: str = "hello") -> tuple[dict[str, Any], Running]:
    """One episode against a policy that says `say`."""

    async def scene() -> tuple[dict[str, Any], Running]:
        template = tiny_template(tmp_path / "model")
        async with gateway(template, Policy(template, say=lambda request: say)) as running:
            driver = driver_of(TaskConfig.model_validate({"name": "t", "agent": agent}))
            endpoint = {"url": running.url, "key": KEY, "model": "policy"}
            return await asyncio.to_thread(CommandAgent().run, driver.agent, endpoint, EPISODE), running

    return asyncio.run(scene())


def folder(tmp_path: Path, program: str) -> str:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "program.py").write_text(program)
    return str(tmp_path / "files")


@sandboxed
def test_a_program_finds_the_gateway_in_the_usual_variables_and_its_reward_is_what_it_wrote(tmp_path: Path) -> None:
    program = ASK + 'open(os.environ["ROLLART_REWARD"], "w").write(json.dumps({"reward": 0.5, "letters": 5}))'
    found, running = play(tmp_path, {"command": ["python3", "program.py"], "files": folder(tmp_path, program)})
    assert found["reward"] == 0.5
    assert found["info"] == {"output": "hello\n", "letters": 5}
    (turn,) = running.sessions.close(KEY).turns
    assert [message.content for message in turn.messages] == ["seven"]


@sandboxed
def test_without_a_reward_file_only_the_output_is_returned_for_a_reward_function(tmp_path: Path) -> None:
    found, _ = play(tmp_path, {"command": ["python3", "program.py"], "files": folder(tmp_path, ASK)})
    assert found["reward"] is None
    assert found["info"]["output"] == "hello\n"
    assert "there is no" in found["info"]["no_reward"]


@sandboxed
def test_the_messages_api_is_reached_through_the_variables_of_anthropic(tmp_path: Path) -> None:
    ask = (
        'body=\'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}\'; '
        'exec 3<>"/dev/tcp/127.0.0.1/${ANTHROPIC_BASE_URL##*:}"; '
        'printf "POST /v1/messages HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n'
        'x-api-key: $ANTHROPIC_API_KEY\\r\\ncontent-length: ${#body}\\r\\n\\r\\n%s" "$body" >&3; cat <&3'
    )
    found, _ = play(tmp_path, {"command": ["bash", "-c", ask]})
    assert "200 OK" in found["info"]["output"] and '"text":"hello"' in found["info"]["output"].replace(" ", "")


@sandboxed
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo last words; exit 3", "ended with exit code 3; the end of its output: 'last words'"),
        ("no-such-program", "ended with exit code 127"),
        ("kill -KILL $PPID; sleep 60", "the shell ended"),
    ],
)
def test_a_program_that_fails_is_reported_with_the_end_of_its_output(tmp_path: Path, script: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        play(tmp_path, {"command": ["bash", "-c", script]})


@sandboxed
def test_limits_and_folders_to_see_are_the_sandboxs(tmp_path: Path) -> None:
    seen = Path("/tmp/rollart-test-seen")
    seen.mkdir(exist_ok=True)
    (seen / "note").write_text("note")
    script = f"ulimit -v; cat {seen}/note; touch {seen}/other 2>&1; ls / | tr '\\n' ' '"
    try:
        found, _ = play(
            tmp_path, {"command": ["bash", "-c", f"{script}; true"], "mounts": [str(seen)], "limits": {"memory": 900}}
        )
    finally:
        shutil.rmtree(seen)
    output = found["info"]["output"]
    assert str(900 * 1024) in output and "note" in output and "Read-only file system" in output
    assert "root" not in output.split()


class Unheard:
    def emit(self, event: AnyEvent) -> None:
        pass


async def pooled(tmp_path: Path, agents: dict[str, Any]) -> dict[str, Step | Exception]:
    """An episode of each agent as in a run, in processes; the policy says `hello`."""
    tiny.tokenizer(500).save_pretrained(tmp_path)
    words = [*ChatTemplate(tmp_path).encode("hello"), tiny.SPECIAL.index(tiny.END)]
    tasks = [TaskConfig.model_validate({"name": name, "agent": agent}) for name, agent in agents.items()]
    launcher, found = LocalLauncher(), dict[str, Step | Exception]()
    gateway = Gateway(tmp_path, launcher, Unheard(), tmp_path)
    pool = AgentPool(tasks, gateway, launcher, processes=1, log=tmp_path / "agents.log")

    async def generate(request: GenerationRequest, stream: TokenStream | None = None, /) -> Completion:
        return Completion(words, [-1.0] * 6, [0] * 6, "stop", len(request.tokens))

    try:
        await asyncio.gather(gateway.start(), pool.start())
        for task in tasks:
            try:
                assert task.agent is not None
                async with pool.claim(task.name) as agent, asyncio.timeout(task.agent.deadline):
                    found[task.name] = await agent.play(task.name, 7, False, generate, lambda captured: None)
            except (RollartError, TimeoutError) as error:
                found[task.name] = error
    finally:
        await asyncio.gather(pool.close(), gateway.close())
        await launcher.close()
    return found


@sandboxed
@pytest.mark.slow
def test_in_a_run_a_missing_reward_is_a_failure_and_a_late_program_is_killed_with_its_sandbox(tmp_path: Path) -> None:
    ask = ASK.replace('episode["args"]["word"]', '"word"')
    files = folder(tmp_path, ask)
    (tmp_path / "files" / "rewarded.py").write_text(ask + 'open(os.environ["ROLLART_REWARD"], "w").write("0.5")')
    agents = {
        "rewarded": {"command": ["python3", "rewarded.py"], "files": files},
        "silent": {"command": ["python3", "program.py"], "files": files},
        "late": {"command": ["sleep", "98765"], "deadline": 2.0},
        "broken": {"command": ["false"]},
    }
    found = asyncio.run(pooled(tmp_path / "model", agents))
    assert isinstance(found["rewarded"], Step) and found["rewarded"].reward == 0.5
    assert isinstance(found["silent"], RewardFailed)
    assert isinstance(found["late"], TimeoutError) and isinstance(found["broken"], EnvironmentFailed)
    assert not [process for process in psutil.process_iter(["cmdline"]) if "98765" in (process.info["cmdline"] or [])]


def problem(tmp_path: Path, agent: Any) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": {"tiny": {}}, "tasks": [{"name": "t", "agent": agent}]}))
    with pytest.raises(ConfigError) as error:
        preflight.load_run(path)
    return str(error.value)


def test_a_list_is_a_command() -> None:
    task = TaskConfig.model_validate({"name": "t", "agent": ["python3", "-m", "mine"]})
    assert task.agent is not None and task.agent.command == ["python3", "-m", "mine"]
    assert driver_of(task).agent["command"] == ["python3", "-m", "mine"]


def test_an_invalid_command_is_reported_before_the_run(tmp_path: Path) -> None:
    assert "at least 1 item" in problem(tmp_path, [])
    assert "either `function` or `command`" in problem(tmp_path, {"deadline": 3})
    assert "`files` is for an agent with a `command`" in problem(
        tmp_path, {"function": "rollart.agents.demo:digits", "files": str(tmp_path)}
    )
    assert "no limit 'memori'; did you mean 'memory'?" in problem(tmp_path, {"command": ["x"], "limits": {"memori": 3}})
    assert "needs the folder '/no/such'" in problem(tmp_path, {"command": ["x"], "files": "/no/such"})
