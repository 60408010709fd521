import asyncio
import random
from contextlib import closing

import psutil
import pytest

from rollart.config import EnvironmentsConfig, TaskConfig
from rollart.envs.pool import EnvironmentPool
from rollart.envs.terminal import Terminal, player
from rollart.envs.terminal.environment import observation, parse
from rollart.envs.terminal.problems import KINDS, belongs_to_held_out
from rollart.sandbox.bubblewrap import SandboxError
from rollart.sandbox.shell import CommandResult


def play(environment, seed, act):
    with closing(environment):
        environment.reset(seed)
        step = {"done": False}
        while not step["done"]:
            step = environment.step(act(environment))
        return step


def solve(environment):
    return player(environment, random.Random(0), skill=1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("difficulty", [1, 3])
def test_the_scripted_solution_is_worth_one_and_doing_nothing_is_worth_nothing(kind, difficulty):
    environment = Terminal(kinds=[kind], difficulty=difficulty)
    for seed in range(2):
        solved = play(environment, seed, solve)
        assert (solved["reward"], solved["info"]["success"], solved["truncated"]) == (1.0, True, False)
        idle = play(environment, seed, lambda _: "done")
        assert (idle["reward"], idle["info"]["success"]) == (0.0, False)
        assert solved["info"]["kind"] == kind and all(solved["info"]["checks"].values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_one_task_and_other_seeds_give_others(kind):
    maker = KINDS[kind]
    drawn = [maker(random.Random(seed), 1) for seed in range(200)]
    assert drawn[0] == maker(random.Random(0), 1)
    assert len({repr(problem) for problem in drawn}) > 190
    harder = [maker(random.Random(seed), 3) for seed in range(200)]
    assert size(harder) > size(drawn)


def size(problems):
    return sum(len(text) for problem in problems for text in (*problem.files.values(), *problem.solution))


def test_held_out_tasks_are_never_trained():
    trained, held_out = Terminal(), Terminal(held_out=True)
    seen = {repr(trained._draw(seed)) for seed in range(300)}
    kept = [held_out._draw(seed) for seed in range(300)]
    assert all(belongs_to_held_out(problem) for problem in kept)
    assert not seen & {repr(problem) for problem in kept}
    assert len(seen) > 290


def test_the_turn_limit_ends_the_episode_with_what_was_done_by_then():
    step = play(Terminal(kinds=["find"], turns=1), 4, solve)
    assert (step["reward"], step["truncated"]) == (1.0, True) and step["messages"] == "[exit 0]"


def test_nothing_of_the_checks_is_in_the_sandbox_and_tricks_in_the_shell_do_not_reach_them():
    environment = Terminal(kinds=["test"], rules=False)
    environment.reset(3)
    expected = environment.problem.checks[0].expected
    shown = environment.step(f"grep -rsF '{expected}' /task /tmp /dev/shm /etc")["messages"]
    assert shown in ("[exit 1]", "[exit 2]")  # 2: some of it cannot even be read
    environment.step("python3() { echo '" + expected + "'; }; export -f python3; echo 'exit 0' > .bashrc")
    assert environment.step("done")["reward"] == 0.0


def test_a_program_that_ends_the_check_early_fails_it():
    environment = Terminal(kinds=["test"], rules=False)
    environment.reset(3)
    package = next(name for name in environment.problem.files if name.endswith("core.py"))
    environment.step(f"echo 'import os; print(0, flush=True); os._exit(0)' > {package}")
    assert environment.step("done")["reward"] == 0.0


@pytest.mark.parametrize("mischief", ["mkdir x; chmod 0 x", "kill -9 -1; kill -9 $$", "exec 9>&-; set -e; false"])
def test_mischief_costs_the_reward_but_does_not_break_the_environment(mischief):
    environment = Terminal(kinds=["config"], deadline=5.0)
    environment.reset(1)
    environment.step(mischief)
    assert environment.step("done")["info"]["success"] is False
    assert play(environment, 2, solve)["reward"] == 1.0


def test_the_observation_shows_output_and_exit_code():
    assert observation(CommandResult("a\n", 0)) == "a\n[exit 0]"
    assert observation(CommandResult("a", 2)) == "a\n[exit 2]"
    assert observation(CommandResult("", None, "it was killed")) == "[it was killed]"


@pytest.mark.parametrize(
    ("action", "command"),
    [
        ("ls -l\n", "ls -l"),
        ("I look.\n```bash\nls\npwd\n```\nThen more.", "ls\npwd"),
        ("```\nls\n```", "ls"),
        ("```sh\nls```", "ls"),
        ("done", ""),
        (" Submit. ", ""),
        ("```bash\ndone\n```", ""),
        ("`done`", ""),
        ("for x in 1; do echo; done", "for x in 1; do echo; done"),
        ("", ":"),
    ],
)
def test_an_action_is_a_command_in_plain_text_or_in_a_block(action, command):
    assert parse(action) == command


def test_invalid_arguments_are_refused_with_a_reason(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"no kind \['dance'\]; the kinds are find"):
        Terminal(kinds=["dance"])
    with pytest.raises(ValueError, match="difficulty of 1, 2 or 3"):
        Terminal(difficulty=4)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        Terminal().reset(1)


def test_episodes_run_in_worker_processes_and_a_cancelled_one_leaves_no_process():
    async def run():
        task = TaskConfig(name="t", env="rollart.envs.terminal:Terminal", args={"kinds": ["config"], "rules": False})
        pool = EnvironmentPool([task], EnvironmentsConfig(processes=2))
        try:
            async with pool.claim("t", held_out=False) as environment:
                assert (await environment.reset(1))[0].content.startswith("Set ")
                shown = await environment.step("cat app.conf; sleep 0.01 &")
                assert shown.messages[0].content.endswith("[exit 0]")
                hanging = asyncio.create_task(environment.step("echo x > /tmp/x; sleep 1000"))
                await asyncio.sleep(0)
                inside = [process for process in psutil.Process().children(recursive=True) if process.name() == "bash"]
                hanging.cancel()
                await asyncio.gather(hanging, return_exceptions=True)
                assert len(inside) >= 2
        finally:
            await pool.close()
        return inside

    assert not psutil.wait_procs(asyncio.run(run()), timeout=30)[1]
