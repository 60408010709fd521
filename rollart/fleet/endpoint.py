"""Held-out episodes played by a model behind any OpenAI-compatible endpoint: a baseline for one's own.

The endpoint is an engine like any other, and trajectories run as in training. Since it takes messages, not tokens, the
"tokens" of these trajectories are the bytes of a conversation in JSON lines, which the engine reads back. An endpoint
that does not answer is an engine that failed, never a policy that did.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rollart.config import RunFile
from rollart.core.action import ParsedAction
from rollart.core.errors import ConfigError, EngineFailed
from rollart.core.events import EventSink
from rollart.core.llm_client import NoReply, ask
from rollart.core.types import (
    Completion,
    EngineStatus,
    GenerationRequest,
    LoadResult,
    Message,
    Publication,
)
from rollart.envs.pool import EnvironmentPool
from rollart.models.chat import CANONICAL, REASONING_TAGS, ReasoningTags, declared_tools, with_instructions
from rollart.rewards.invokers import Rewards
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.router import Router
from rollart.rollout.trajectory import RolloutTask, TrajectoryRunner

NO_LIMIT = 1 << 40  # the endpoint limits the context itself


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """`url` ends before `/chat/completions`; `key` is the environment variable that may hold the API key; `parallel`
    requests at once."""

    url: str
    model: str
    key: str = "OPENAI_API_KEY"
    parallel: int = 16
    timeout: float = 120.0


class ConversationBytes:
    """Implements `rollart.core.protocols.Renderer`."""

    stop: tuple[int, ...] = ()

    def open(self, messages: Sequence[Message]) -> list[int]:
        tools = declared_tools(messages)
        if tools:
            messages = with_instructions(messages[1:], CANONICAL.explain(tools))
        return list(b"".join(map(_message_line, messages)))

    def extend(self, last: int, messages: Sequence[Message]) -> list[int]:
        return self.open(messages)

    def may_fit(self, messages: Sequence[Message], tokens: int) -> bool:
        return True

    def read(self, prompt: Sequence[int], tokens: Sequence[int], opening: Sequence[Message]) -> ParsedAction:
        text = str(json.loads(bytes(tokens))["content"])
        reasoning, start = ReasoningTags(*REASONING_TAGS[0]).split(text, inside=False)
        return ParsedAction(text[start:], reasoning)


def _message_line(message: Message) -> bytes:
    """Results of tools are a user's messages: an endpoint that was not given the calls refuses others."""
    if message.role == "tool":
        return _line("user", f"<tool_response>\n{message.content}\n</tool_response>")
    return _line(message.role, message.content)


def _line(role: str, content: str) -> bytes:
    return json.dumps({"role": role, "content": content}).encode() + b"\n"


class EndpointEngine:
    """Implements `rollart.core.protocols.Engine`."""

    def __init__(self, endpoint: ModelEndpoint, threads: ThreadPoolExecutor) -> None:
        self._endpoint, self._threads = endpoint, threads

    async def generate(self, request: GenerationRequest) -> Completion:
        reply = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, request)
        tokens = list(_line("assistant", reply))
        return Completion(tokens, [0.0] * len(tokens), [0] * len(tokens), "stop", prompt=len(request.tokens))

    def _ask(self, request: GenerationRequest) -> str:
        messages = [json.loads(line) for line in bytes(request.tokens).splitlines()]
        sampling = request.sampling
        options = {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_tokens}
        to = self._endpoint
        try:
            return ask(to.url, to.model, messages, key=to.key, options=options, timeout=to.timeout, whole=False)
        except NoReply as error:
            raise EngineFailed(f"{to.model} {error}") from error

    async def prefill(self, request: GenerationRequest) -> int:
        return 0

    async def abort(self, request_id: str) -> None:
        """Its answer is dropped when it comes."""

    async def load(self, publication: Publication) -> LoadResult:
        raise EngineFailed("an endpoint has weights of its own")

    async def status(self) -> EngineStatus:
        return EngineStatus(
            version=0, running=0, waiting=0, kv_bytes=0, kv_budget=0, prefilled=0, generated=0, swaps=0, busy_s=0.0
        )


@asynccontextmanager
async def endpoint_runner(
    run: RunFile, endpoint: ModelEndpoint, logs: Path, sink: EventSink
) -> AsyncIterator[TrajectoryRunner]:
    """Starts the environments and rewards of the run on this machine. Raises ConfigError for tasks with agents, which
    call an endpoint themselves."""
    if agents := [task.name for task in run.tasks if task.agent is not None]:
        raise ConfigError(f"task {agents[0]} is an agent, which calls a model itself; an endpoint plays environments")
    logs.mkdir(exist_ok=True)
    environments = EnvironmentPool(run.tasks, run.environments, log=logs / "environments.log", sink=sink)
    rewards = Rewards(run.tasks, run.rewards, log=logs / "rewards.log", sink=sink, cluster=run.cluster)
    with ThreadPoolExecutor(endpoint.parallel, "endpoint") as threads:
        async with AsyncExitStack() as stack:
            for pool in (environments, rewards):
                stack.push_async_callback(pool.close)
                await pool.start()
            engines = EngineRegistry({endpoint.model: EndpointEngine(endpoint, threads)}, sink=sink)
            yield TrajectoryRunner(
                environments=environments,
                router=Router(engines),
                renderer=ConversationBytes(),
                rewards=rewards,
                sink=sink,
            )


def without_limits(tasks: Sequence[RolloutTask]) -> list[RolloutTask]:
    """`max_context` counts tokens of our own model."""
    return [replace(task, max_context=NO_LIMIT) for task in tasks]
