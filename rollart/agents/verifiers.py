"""Environments of verifiers 0.4 as agents: `agent: rollart.agents.verifiers:play`, with `family: verifiers`.

Their training client renders each prompt with the policy's own tokenizer and requests tokens, so verifiers works with
exactly what was sampled. Runs with the Python of the family: verifiers and the standard library only.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from rollart.core.endpoint import AgentEpisode, Endpoint

MAX_TASKS = 1000
# Imported once in the host, so that every episode is forked with them loaded.
PRELOAD = (
    *("verifiers.v1.harnesses.null", "verifiers.v1.harnesses.bash", "renderers.client", "renderers.default"),
    *("transformers.models.auto.tokenization_auto", "openai.resources", "anyio._backends._asyncio", "httpcore"),
    *("mcp.server", "renderers.gpt_oss"),
)
for _name in PRELOAD:
    importlib.import_module(_name)


async def play(endpoint: Endpoint, episode: AgentEpisode) -> dict[str, Any]:
    """An agent with the arguments `env` (verifiers' block of that name: taskset, agents, harnesses, runtimes), `client`
    (`train`; or `eval` for programs that stream or speak other APIs than chat completions), `tasks` (how many of the
    taskset to use), `path` (where its module is, if it is not installed) and `success` (the reward that is one)."""
    args = dict(episode.args)
    if args.get("path"):
        sys.path.insert(0, str(Path(args["path"]).absolute()))
    env = load_environment(resolve_env_config(args["env"]))
    tasks = list(env.taskset.take(int(args.get("tasks", MAX_TASKS))))
    if not tasks:
        raise ValueError(f"the taskset of {args['env']} has no tasks")
    task = tasks[episode.choose([each.key for each in tasks])]
    context = ModelContext(model=endpoint.model, client=client_of(endpoint, str(args.get("client", "train"))))
    async with env.serving():
        ended = await env.run_episode(task, context)
    failed = [*ended.errors, *(error for trace in ended.traces for error in trace.errors)]
    if not ended.ok:
        last = failed[-1] if failed else None
        raise RuntimeError(f"{last.type}: {last.message}" if last else "the episode ended without a result")
    return outcome(ended.traces, float(args.get("success", 1.0)))


def client_of(endpoint: Endpoint, kind: str) -> TrainClientConfig | EvalClientConfig:
    """The key is in OPENAI_API_KEY, where every agent finds it."""
    if kind == "eval":
        return EvalClientConfig(base_url=endpoint.base_url, api_key_var="OPENAI_API_KEY")
    return TrainClientConfig(
        base_url=endpoint.base_url, api_key_var="OPENAI_API_KEY", renderer_model_name=endpoint.tokenizer
    )


def outcome(traces: list[Any], success: float) -> dict[str, Any]:
    """The mean over the traces of agents that are trained; none if one of them was not scored."""
    trained = [trace for trace in traces if trace.agent.trainable] or traces
    scored = all(trace.rewards and None not in trace.rewards.values() for trace in trained)
    info = {name: value for trace in trained for name, value in trace.metrics.items() if value is not None}
    if not scored:
        return {"reward": None, "info": info}
    reward = sum(trace.reward for trace in trained) / len(trained)
    return {"reward": reward, "success": reward >= success, "info": info}
