"""Harbor task folders in our own sandbox: built, played, verified."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollart.agents.harbor import trial
from rollart.agents.harbor.__main__ import solved
from rollart.agents.harbor.image import image_of
from rollart.agents.harbor.task import folders, load
from rollart.agents.harbor.trial import play_and_verify
from rollart.app import preflight
from rollart.core.endpoint import AgentEpisode, Endpoint
from rollart.core.event_log import read_events
from rollart.fleet import controller as controller
from rollart.observe.metrics import measure
from rollart.sandbox.bubblewrap import SandboxLimits
from rollart.sandbox.shell import Sandbox
from tests.gateway.gateways import KEY, Policy, gateway, tiny_template

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples" / "harbor"
TASK = """\
version = "1.0"
[agent]
timeout_sec = 2
[verifier]
timeout_sec = 20
[verifier.env]
WORD = "from the task"
"""
sandboxed = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def play(tmp_path: Path, answers: list[str], **args: Any) -> dict[str, Any]:
    """A trial by a policy that gives these answers, one after the other."""

    async def scene() -> dict[str, Any]:
        template = tiny_template(tmp_path / "model")
        said = iter(answers)
        async with gateway(template, Policy(template, say=lambda request: next(said))) as running:
            endpoint, episode = Endpoint(running.url, KEY), AgentEpisode("e", "t", 0, args=args)
            return await asyncio.to_thread(trial, endpoint, episode)

    return asyncio.run(scene())


def made(tmp_path: Path, test: str, dockerfile: str = "FROM scratch\n") -> Path:
    """A task of one's own, with this verifier."""
    folder = tmp_path / "task"
    for name, text in {
        "task.toml": TASK,
        "instruction.md": "Do it.",
        "environment/Dockerfile": dockerfile,
        "environment/notes/a.txt": "a",
        "environment/b.txt": "b",
        "tests/test.sh": test,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def doing(command: str) -> Callable[[Sandbox], dict[str, Any]]:
    def do(sandbox: Sandbox) -> dict[str, Any]:
        return {"output": sandbox.run(command).output}

    return do


@sandboxed
@pytest.mark.parametrize("folder", folders(EXAMPLES / "tasks"), ids=lambda path: path.name)
def test_the_solution_of_every_example_is_rewarded_and_doing_nothing_is_not(folder: Path) -> None:
    task = load(folder)
    assert solved(task, SandboxLimits())["reward"] == 1
    nothing = play_and_verify(task, SandboxLimits(), doing(":"))
    assert nothing["reward"] == 0 and nothing["success"] is False


@sandboxed
def test_the_policy_itself_works_in_the_shell_until_it_is_done(tmp_path: Path) -> None:
    answers = ["ls /data", "```bash\ngrep -c ERROR /data/app.log > answer.txt\n```", "done"]
    found = play(tmp_path, answers, folder=str(EXAMPLES / "tasks" / "count-errors"), turns=5)
    assert (found["reward"], found["success"]) == (1.0, True)
    assert found["info"] == {"harbor_task": "count-errors", "turns": 3}


@sandboxed
def test_a_program_can_be_the_agent_of_a_trial(tmp_path: Path) -> None:
    program = {"agent": ["python3", "/agent/scribe.py"], "files": str(EXAMPLES)}
    found = play(tmp_path, ["12ab"], folder=str(EXAMPLES / "tasks" / "digits"), **program)
    assert (found["reward"], found["success"], found["info"]["letters"]) == (0.5, False, 4)


@sandboxed
def test_a_program_that_takes_too_long_is_verified_all_the_same_but_one_that_fails_is_not(tmp_path: Path) -> None:
    folder = str(made(tmp_path, "cat /app/half > /logs/verifier/reward.txt"))
    found = play(tmp_path, [], folder=folder, agent=["bash", "-c", "echo 0.5 > half; sleep 1000"])
    assert found["reward"] == 0.5 and "more than 2 s" in found["info"]["killed"]
    with pytest.raises(RuntimeError, match="exit code 3"):
        play(tmp_path, [], folder=folder, agent=["bash", "-c", "exit 3"])


@sandboxed
def test_a_policy_that_is_refused_more_tokens_is_verified_with_what_it_did(tmp_path: Path) -> None:
    folder = str(made(tmp_path, "cat /app/half > /logs/verifier/reward.txt"))
    found = play(tmp_path, ["echo 0.5 > half; seq 3000", "never asked"], folder=folder, rules=False)
    assert (found["reward"], found["info"]["turns"]) == (0.5, 1)


@sandboxed
@pytest.mark.slow
def test_a_harbor_task_trains(tmp_path: Path) -> None:
    small = ["training.steps=2", "training.batch_groups=1", "environments.processes=4", "evaluation.every=0"]
    run = preflight.load_run(EXAMPLES.parent / "harbor.yaml", [*small, "evaluation.final_episodes=2"])
    asyncio.run(controller.train(run, tmp_path))
    shot = measure(read_events(tmp_path / "events"))
    assert shot.step == 2 and shot.trained == 2 * 8 and not shot.drops


@sandboxed
def test_a_verifier_that_writes_no_reward_leaves_none(tmp_path: Path) -> None:
    task = load(made(tmp_path, "exit 1"))
    found = play_and_verify(
        task,
        SandboxLimits(),
        doing("echo 1 > /logs/verifier/reward.txt; mkdir -p /logs/verifier; echo 1 > /logs/reward"),
    )
    assert found["reward"] is None
    assert "/logs/verifier/reward.json" in found["info"]["no_reward"]


@sandboxed
def test_what_the_agent_wrote_in_the_verifiers_folders_does_not_count(tmp_path: Path) -> None:
    forged = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json; echo exit 0 > /tests/test.sh"
    task = load(made(tmp_path, "ls /logs/verifier /solution 2>&1; echo 0.25 > /logs/verifier/reward.txt"))
    assert play_and_verify(task, SandboxLimits(), doing(forged))["reward"] == 0.25
    linked = (
        "cd /task; rm -r logs tests; ln -s m logs; ln -s m tests; mkdir -p m/verifier; echo 1 > m/verifier/reward.json"
    )
    assert play_and_verify(task, SandboxLimits(), doing(linked))["reward"] == 0.25


@sandboxed
def test_neither_tests_nor_solution_are_there_for_the_agent() -> None:
    task = load(EXAMPLES / "tasks" / "greet")
    found = play_and_verify(task, SandboxLimits(), doing("find /tests /solution /task -type f"))
    assert found["info"]["output"] == ""


@sandboxed
def test_a_dockerfile_is_followed_as_far_as_a_sandbox_can(tmp_path: Path) -> None:
    dockerfile = """\
# a comment
FROM python:3.13 AS base
ARG NAME=me
ENV GREETING="hello $NAME" OTHER=x
WORKDIR /srv/app
COPY --chown=1:1 notes ./notes
COPY b.txt \\
     *.nothing* b.txt /data/
RUN echo "$GREETING" > greeting && echo "$WORD" > word
CMD ["bash"]
"""
    test = '[ "$WORD $OTHER $PWD" = "from the task x /srv/app" ] && echo 1 > /logs/verifier/reward.txt'
    with pytest.raises(ValueError, match=r"copies \*\.nothing\*, which is not in"):
        load(made(tmp_path, test, dockerfile))
    task = load(made(tmp_path, test, dockerfile.replace("*.nothing* ", "")))
    assert (task.image.workdir, task.image.variables["GREETING"]) == ("/srv/app", "hello me")
    found = play_and_verify(task, SandboxLimits(), doing("pwd; cat greeting notes/a.txt /data/b.txt; echo $OTHER"))
    assert found["info"]["output"] == "/srv/app\nhello me\nabx\n"
    assert found["reward"] == 1


@sandboxed
def test_a_run_instruction_that_fails_in_the_sandbox_is_reported_and_can_be_skipped(tmp_path: Path) -> None:
    dockerfile = "FROM debian\nRUN apt-get install -y --no-install-recommends sl\n"
    folder = made(tmp_path, "echo 1 > /logs/verifier/reward.txt", dockerfile)
    with pytest.raises(ValueError, match=r"`RUN .*apt-get install.* fails in a sandbox.*skip_run: true"):
        play_and_verify(load(folder), SandboxLimits(), doing(":"))
    assert play_and_verify(load(folder, skip_run=True), SandboxLimits(), doing(":"))["reward"] == 1


@pytest.mark.parametrize(
    ("dockerfile", "message"),
    [
        ("FROM a\nCOPY --from=b /x /y", "copies from another image"),
        ("FROM a\nCOPY b.txt /etc/b.txt", "writes to /etc/b.txt, which is read-only"),
        ("FROM a\nWORKDIR /usr/src", "writes to /usr/src"),
        ("FROM a\nRUN <<EOF", "heredoc"),
        ("FROM a\nONBUILD RUN x", "ONBUILD"),
    ],
)
def test_what_a_sandbox_does_not_support_is_an_error(tmp_path: Path, dockerfile: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(made(tmp_path, "", dockerfile))


def test_folders_without_a_task_and_tasks_with_services_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no task\.toml"):
        folders(tmp_path)
    folder = made(tmp_path, "")
    (folder / "environment" / "docker-compose.yaml").write_text("services: {}")
    with pytest.raises(ValueError, match=r"needs docker-compose\.yaml"):
        load(folder)


def test_without_a_dockerfile_a_task_is_in_app(tmp_path: Path) -> None:
    assert image_of(tmp_path).workdir == "/app"


def chosen(names: list[str], seed: int, held_out: bool) -> int:
    return AgentEpisode("id", "task", seed, held_out).choose(names)


def test_held_out_tasks_are_never_trained_and_all_others_are() -> None:
    names = [f"task-{number}" for number in range(23)]
    trained = {chosen(names, seed, held_out=False) for seed in range(100)}
    held_out = {chosen(names, seed, held_out=True) for seed in range(100)}
    assert len(held_out) == 4 and trained | held_out == set(range(23)) and not trained & held_out
    assert chosen(["one"], 5, held_out=True) == chosen(["one"], 5, held_out=False) == 0
