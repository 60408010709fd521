"""One trial of a Harbor task: its environment in a sandbox, an agent in it, and the verifier in another one.

The invariants:
- The agent sees neither tests nor solution: the tests run in another sandbox, on a copy of the agent's files.
- The reward is what the verifier wrote to /logs/verifier after the agent had ended; older files are removed.
  Without it there is no reward.
- The verifier has a home of its own: what the agent left in its home is there, but for hidden files, which programs
  read by themselves (packages and .pth files of its user, settings of shells and git).
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from rollart.agents import command
from rollart.agents.demo import chat
from rollart.agents.harbor.task import HarborTask, folders, load
from rollart.core.endpoint import AgentEpisode, Endpoint
from rollart.envs.terminal.environment import RULES, observation, parse
from rollart.sandbox.archive import archive_paths
from rollart.sandbox.bubblewrap import WORK, SandboxLimits
from rollart.sandbox.reward_file import read_reward
from rollart.sandbox.shell import Sandbox, WorkTooBig

AGENT, LOGS = "/agent", "/logs/verifier"
OUTPUT = 8000
CLEAR = "{ chmod -R u+rwx tests logs solution; rm -rf tests logs solution && mkdir -p logs/verifier; } 2>/dev/null"
HOME = "/tmp/home"
FRESH = f"mkdir {HOME} && ln -s {WORK}/* {HOME}/ && export HOME={HOME} PYTHONNOUSERSITE=1 && unset BASH_ENV ENV"
REFUSED = 400  # by the gateway: the context or the calls of the episode are used up
Play = Callable[[Sandbox], dict[str, Any]]


def trial(endpoint: Endpoint, episode: AgentEpisode) -> dict[str, Any]:
    """An agent with the arguments `folder` (a task, or a folder of tasks), `agent` (a command that runs in the sandbox,
    with the folder `files` at /agent; without it the policy itself works, one command per turn), `turns`, `seconds` per
    turn, `rules` (of the shell, before the instruction), `reward` (the name of the value to learn from), `limits` of
    the sandbox, `skip_run`, and `container`: in the image that the Dockerfile describes, built before."""
    args = dict(episode.args)
    paths = folders(Path(args.pop("folder")))
    path = paths[episode.choose([path.name for path in paths])]
    task = load(path, args.pop("skip_run", False), args.pop("container", False))
    limits, key = SandboxLimits(**args.pop("limits", {})), args.pop("reward", "reward")
    play = play_command if "agent" in args else play_policy
    result = play_and_verify(task, limits, lambda sandbox: play(endpoint, task, sandbox, **args), key)
    return dict(result, info={"harbor_task": task.name, **result["info"]})


def play_and_verify(task: HarborTask, limits: SandboxLimits, play: Play, key: str = "reward") -> dict[str, Any]:
    """The verifier's reward for what `play` did."""
    try:
        with Sandbox(limits=limits, output=OUTPUT, mounts=task.image.mounts, image=task.image.container) as sandbox:
            task.image.build(sandbox)
            info = play(sandbox)
            work = sandbox.pack()
    except WorkTooBig as error:
        return {"reward": None, "info": {"no_reward": str(error)}}
    verdict = verify(task, limits, work, key)
    return dict(verdict, info={**info, **verdict["info"]})


def verify(task: HarborTask, limits: SandboxLimits, work: bytes, key: str) -> dict[str, Any]:
    with Sandbox(limits=limits, output=OUTPUT, mounts=task.image.mounts, image=task.image.container) as sandbox:
        if not sandbox.unpack(work):
            return {"reward": None, "info": {"no_reward": "the agent's files do not fit into the verifier's sandbox"}}
        cleared = sandbox.run(CLEAR).exit_code == 0
        if not cleared or not sandbox.unpack(archive_paths([(task.folder / "tests", "tests")])):
            return {"reward": None, "info": {"no_reward": "the tests could not be put into the verifier's sandbox"}}
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in task.variables.items())
        result = sandbox.run(f"{task.image.enter} && {FRESH} && {variables} bash /tests/test.sh", task.verifier_s)
        verdict = read_reward(sandbox, f"{LOGS}/reward.json", f"{LOGS}/reward.txt", key=key)
    if verdict["reward"] is None:
        print(f"{task.name}: {verdict['info']['no_reward']}; the verifier wrote: {result.output}", flush=True)
        return verdict
    return dict(verdict, success=verdict["reward"] >= 1)


def play_command(
    endpoint: Endpoint, task: HarborTask, sandbox: Sandbox, agent: list[str], files: str | None = None
) -> dict[str, Any]:
    """Run a program in the sandbox. If it is killed, by its deadline or a limit, the task is verified all the same."""
    if files and not sandbox.unpack(archive_paths([(Path(files), AGENT[1:])])):
        raise ValueError(f"the agent's files, {files}, do not fit into the sandbox; raise `limits: {{disk: MB}}`")
    variables = {**task.image.variables, "HARBOR_INSTRUCTION": task.instruction}
    result = command.run(
        sandbox=sandbox,
        command=agent,
        endpoint=endpoint,
        variables=variables,
        deadline=task.agent_s,
        folder=task.image.workdir,
    )
    if result.exit_code:
        raise RuntimeError(command.failure(agent, result))
    return {"output": result.output, **({"killed": result.note} if result.note else {})}


def play_policy(
    endpoint: Endpoint, task: HarborTask, sandbox: Sandbox, turns: int = 10, seconds: float = 10.0, rules: bool = True
) -> dict[str, Any]:
    """The policy itself works in the shell: one command per turn, until it is done or a limit is reached."""
    end = time.monotonic() + task.agent_s
    opening = RULES.format(turns=turns, seconds=seconds) if rules else ""
    messages = [{"role": "user", "content": opening + task.instruction}]
    for turn in range(turns):
        try:
            reply = chat(endpoint, messages)
        except HTTPError as error:
            if error.code == REFUSED and turn > 0:
                return {"turns": turn}
            raise RuntimeError(f"the policy did not answer: {error.read().decode(errors='replace')}") from error
        action = parse(reply)
        if not action or time.monotonic() > end:
            return {"turns": turn + 1}
        shown = observation(sandbox.run(action, seconds))
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": shown}]
    return {"turns": turns}
