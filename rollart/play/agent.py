"""One episode of an agent in the terminal: its program runs as in a run, and a person or a saved model answers it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from rollart.agents.pool import AgentPool
from rollart.config import RunFile, TaskConfig
from rollart.core.errors import ConfigError, EngineFailed
from rollart.core.events import NULL_SINK
from rollart.core.protocols import TokenStream
from rollart.core.types import CapturedEpisode, Completion, EpisodeTurn, GenerationRequest, Message, RewardResult
from rollart.gateway.client import Gateway
from rollart.launch.local import LocalLauncher
from rollart.models.chat import ChatRenderer
from rollart.play.episode import Action, EpisodeView, HumanPlayer, load_engine, scored, tokenizer_folder
from rollart.training.client import model_folder

Answer = Callable[[GenerationRequest], Awaitable[Completion]]


async def play_agent(
    run: RunFile, task: TaskConfig, *, seed: int, held_out: bool, player: str, tokens: bool, console: Console
) -> RewardResult | None:
    """The result, or None if the person left before the end. Raises RollartError."""
    if player == "scripted":
        raise ConfigError(f"task {task.name!r} is an agent: answer it yourself (--player human) or by a model folder")
    async with AsyncExitStack() as stack:
        folder = None if player == "human" else await stack.enter_async_context(model_folder(Path(player)))
        known = await stack.enter_async_context(tokenizer_folder(run.model, folder))
        renderer = ChatRenderer(known, run.model.template_args)
        agents = await stack.enter_async_context(_agents(run, task, known))
        person = Person(console, renderer)
        answer: Answer = person.answer
        if folder is not None:
            answer = (await stack.enter_async_context(load_engine(folder, run.engine))).generate
        shown = Requests(EpisodeView(console, renderer if tokens else None, typed=folder is None), renderer, answer)
        ends = None if folder is None else _deadline(run, task)
        try:
            async with asyncio.timeout(ends), agents.claim(task.name) as claim:
                step = await claim.play("play", seed, held_out, shown.generate, shown.keep)
        except EngineFailed:
            if not person.left:
                raise
            shown.view.show_end("you left", None)
            return None
        except TimeoutError:
            raise EngineFailed(f"the agent did not end within its {ends:g} seconds") from None
        result = RewardResult(step.reward or 0.0, success=step.info.get("success"))
        if step.reward is None:
            result = await scored(run, task, seed, shown.turns, truncated=step.truncated, info=dict(step.info))
        count = f"{len(shown.turns)} {'answer' if len(shown.turns) == 1 else 'answers'}"
        shown.view.show_end(f"{'truncated' if step.truncated else 'finished'} after {count}", result)
        return result


def _deadline(run: RunFile, task: TaskConfig) -> float:
    return (task.agent and task.agent.deadline) or run.rollout.trajectory_deadline


@asynccontextmanager
async def _agents(run: RunFile, task: TaskConfig, model: Path) -> AsyncIterator[AgentPool]:
    """The host of one agent, with a gateway of its own."""
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="rollart-play-")))
        launcher = LocalLauncher()
        stack.push_async_callback(launcher.close)
        gateway = Gateway(model, launcher, NULL_SINK, logs, template_args=run.model.template_args)
        stack.push_async_callback(gateway.close)
        await gateway.start()
        log = logs / "agents.log"
        pool = AgentPool([task], gateway, launcher, processes=1, limits=run.environments.limits, log=log)
        stack.push_async_callback(pool.close)
        await pool.start()
        yield pool


class Person:
    """Types a line for each request."""

    def __init__(self, console: Console, renderer: ChatRenderer) -> None:
        self._typing, self._renderer = HumanPlayer(console), renderer
        self.left = False

    async def answer(self, request: GenerationRequest) -> Completion:
        typed = await self._typing.act(request.turn, request.tokens, ())
        if typed is None:
            self.left = True
            raise EngineFailed("the person at the terminal left")
        tokens = self._renderer.action(typed.text)
        return Completion(tokens, [0.0] * len(tokens), [0] * len(tokens), "stop", prompt=len(request.tokens))


class Requests:
    """Shows what each request adds to the one before it, and its answer. One at a time: a person has one terminal."""

    def __init__(self, view: EpisodeView, renderer: ChatRenderer, answer: Answer) -> None:
        self.view, self._renderer, self._answer = view, renderer, answer
        self._free = asyncio.Lock()
        self._context: list[int] = []
        self.turns: tuple[EpisodeTurn, ...] = ()

    async def generate(self, request: GenerationRequest, stream: TokenStream | None = None, /) -> Completion:
        async with self._free:
            new = request.tokens[_common(self._context, request.tokens) :]
            self.view.show_observation([Message("request", self._renderer.text(new))], new)
            completion = await self._answer(request)
            self._context = [*request.tokens, *completion.tokens]
            said = self._renderer.read(request.tokens, completion.tokens, ())
            self.view.show_action(Action(said.text, completion.tokens, said.reasoning), completion.tokens)
            return completion

    def keep(self, captured: CapturedEpisode) -> None:
        self.turns = tuple(
            EpisodeTurn(turn.messages, turn.action, turn.reward, turn.reasoning) for turn in captured.turns
        )


def _common(before: Sequence[int], now: Sequence[int]) -> int:
    return next((at for at, (old, new) in enumerate(zip(before, now, strict=False)) if old != new), len(before))
