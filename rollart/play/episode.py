"""One episode in the terminal, shown as the policy sees it: message by message or token by token.

The environment runs in a process of its own, with the Python of its family, and the reward is computed, as in a run.
The player is a person, the task's scripted player, or a saved model. The event loop never blocks on the person, so
Ctrl-C works at once.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from rollart.config import EngineConfig, ModelConfig, RunFile, TaskConfig
from rollart.config.yaml_tree import did_you_mean
from rollart.core.errors import ConfigError, RollartError
from rollart.core.seeds import seed_of
from rollart.core.types import Episode, EpisodeTurn, GenerationRequest, Message, RewardResult, Sampling, Step
from rollart.envs.single import SingleEnvironment, single_environment
from rollart.models.chat import ChatRenderer
from rollart.rewards.invokers import Rewards
from rollart.training.client import model_folder

if TYPE_CHECKING:
    from rollart.engines.torch.engine import TorchEngine

ACT_TIMEOUT = 600.0  # seconds, for a model of any size
ROLES = {"system": "yellow", "user": "cyan", "assistant": "green", "tool": "magenta"}
STYLES = ("on grey15", "on grey30")  # alternating tokens


async def play(
    run: RunFile, task: TaskConfig, *, seed: int, held_out: bool, player: str, tokens: bool, console: Console
) -> RewardResult | None:
    """The result, or None if the player left before the end. Raises RollartError."""
    folder = None if player in ("human", "scripted") else Path(player)
    if player == "scripted" and task.player is None:
        raise ConfigError(f"task {task.name!r} has no `player`; play it yourself (--player human) or with a model")
    async with AsyncExitStack() as stack:
        if folder is not None:
            folder = await stack.enter_async_context(model_folder(folder))
        renderer = None
        if folder is not None or tokens:
            known = await stack.enter_async_context(tokenizer_folder(run.model, folder))
            renderer = ChatRenderer(known, run.model.template_args)
        env = await stack.enter_async_context(single_environment(task, run.environments))
        actor: Player
        if folder is not None and renderer is not None:
            actor = ModelPlayer(await stack.enter_async_context(load_engine(folder, run.engine)), renderer, task, seed)
        else:
            actor = ScriptedPlayer(env, seed) if player == "scripted" else HumanPlayer(console)
        view = EpisodeView(console, renderer if tokens else None, typed=player == "human")
        runner = EpisodeRunner(task=task, env=env, player=actor, view=view, renderer=renderer, seed=seed)
        return await runner.run(held_out, run)


def task_of(run: RunFile, name: str) -> TaskConfig:
    known = {task.name: task for task in run.tasks}
    if name not in known:
        near = did_you_mean(name, sorted(known))
        raise ConfigError(f"the run file has no task {name!r}{near or '; it has ' + ', '.join(known)}")
    return known[name]


@asynccontextmanager
async def tokenizer_folder(model: ModelConfig, folder: Path | None) -> AsyncIterator[Path]:
    """With tokenizer and template of the model that plays or, if none does, of the one that the run starts from."""
    if folder or model.path:
        yield folder or Path(str(model.path))
        return
    from rollart.models import tiny

    if model.tiny is None:
        raise ConfigError("model: it has sizes but no weights; name a model folder with --model, or give model.path")
    with TemporaryDirectory(prefix="rollart-play-") as made:
        tiny.tokenizer(model.tiny.context).save_pretrained(made)
        yield Path(made)


@dataclass(frozen=True, slots=True)
class Action:
    """`tokens` are those that a model sampled; None: it was not sampled."""

    text: str
    tokens: list[int] | None = None
    reasoning: str = ""


class Player(Protocol):
    async def act(self, turn: int, context: Sequence[int], opening: Sequence[Message]) -> Action | None:
        """`context` are the tokens so far, empty without a renderer; `opening` are the first messages. None: the player
        leaves."""
        ...


class HumanPlayer:
    """Types a line for each action; the end of the input is leaving."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._typed = b""

    async def act(self, turn: int, context: Sequence[int], opening: Sequence[Message]) -> Action | None:
        self._console.print("assistant> ", style="bold green", end="")
        while b"\n" not in self._typed and (piece := await _read_stdin()):
            self._typed += piece
        if not self._typed:
            self._console.print()
            return None
        line, _, self._typed = self._typed.partition(b"\n")
        return Action(line.decode(errors="replace"))


async def _read_stdin() -> bytes:
    """Some bytes of stdin; empty at its end."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    source = sys.stdin.fileno()
    with suppress(PermissionError):  # a file, whose reads never block
        loop.add_reader(source, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(source)
    return os.read(source, 1 << 16)


@dataclass(frozen=True, slots=True)
class ScriptedPlayer:
    """The `player` of the task, in the environment's process."""

    env: SingleEnvironment
    seed: int

    async def act(self, turn: int, context: Sequence[int], opening: Sequence[Message]) -> Action | None:
        return Action(await self.env.scripted(seed_of(self.seed, "player", turn)))


@dataclass(frozen=True, slots=True)
class ModelPlayer:
    """Samples as a run does."""

    engine: "TorchEngine"
    renderer: ChatRenderer
    task: TaskConfig
    seed: int

    async def act(self, turn: int, context: Sequence[int], opening: Sequence[Message]) -> Action | None:
        seed = seed_of(self.seed, "play", turn)
        sampling = Sampling(**self.task.sampling.model_dump(), stop=self.renderer.stop, seed=seed)
        request = GenerationRequest(
            id=f"play/{turn}", session="play", task=self.task.name, turn=turn, tokens=list(context), sampling=sampling
        )
        async with asyncio.timeout(ACT_TIMEOUT):
            completion = await self.engine.generate(request)
        said = self.renderer.read(context, completion.tokens, opening)
        return Action(said.text, completion.tokens, said.reasoning)


@asynccontextmanager
async def load_engine(folder: Path, config: EngineConfig) -> "AsyncIterator[TorchEngine]":
    """An engine in this process."""
    import torch
    from transformers.utils import logging

    from rollart.engines.backends import alone
    from rollart.engines.torch.engine import TorchEngine
    from rollart.engines.torch.model import EngineModel
    from rollart.launch.service import torch_device

    logging.disable_progress_bar()
    config = alone(config, folder)
    torch.set_num_threads(config.thread_count)
    model = EngineModel.open(folder, getattr(torch, config.dtype), torch_device(config.device, {}))
    async with TorchEngine(model, config) as engine:
        yield engine


class EpisodeView:
    """Prints an episode. `typed`: the actions are on the screen already."""

    def __init__(self, console: Console, renderer: ChatRenderer | None, typed: bool) -> None:
        self._console, self._renderer, self._typed = console, renderer, typed

    def show_observation(self, messages: Sequence[Message], prompt: Sequence[int]) -> None:
        for message in messages:
            self._message(message.role, message.content)
        self._tokens(prompt)

    def show_action(self, action: Action, tokens: Sequence[int]) -> None:
        if action.reasoning:
            self._message("reasoning", action.reasoning)
        if not self._typed:
            self._message("assistant", action.text)
        self._tokens(tokens)

    def show_step(self, step: Step) -> None:
        if step.done and any(message.content for message in step.messages):
            self.show_observation(step.messages, ())
        if step.reward:
            self._console.print(f"  reward {step.reward:g}", style="bold", highlight=False)

    def show_end(self, why: str, result: RewardResult | None) -> None:
        text = Text(f"\n{why}", style="bold")
        if result is not None:
            text.append(f"; reward {result.value:g}")
            if result.parts:
                text.append(" (" + ", ".join(f"{name} {value:g}" for name, value in result.parts.items()) + ")")
            if result.success is not None:
                text.append(", success" if result.success else ", no success", "green" if result.success else "red")
        self._console.print(text)

    def _message(self, role: str, content: str) -> None:
        self._console.print(Text(role, style=f"bold {ROLES.get(role, 'white')}"))
        self._console.print(Padding(Text(content.rstrip() or "(nothing)"), (0, 0, 0, 2), expand=False))

    def _tokens(self, tokens: Sequence[int]) -> None:
        if self._renderer is None or not tokens:
            return
        pieces = Text(f"{len(tokens)} tokens: ", style="dim")
        for number, (label, text) in enumerate(token_runs([(each, self._renderer.piece(each)) for each in tokens])):
            pieces.append(f"{label}:", style="dim")
            pieces.append(repr(text), style=STYLES[number % 2])
            pieces.append(" ")
        self._console.print(Padding(pieces, (0, 0, 0, 2), expand=False))


def token_runs(tokens: Sequence[tuple[int, str]]) -> list[tuple[str, str]]:
    """What to print of tokens and their pieces: id and piece or, for characters in a row, how many and their text.

    >>> token_runs([(4, "<|user|>"), (24, "0"), (8, " "), (28, "4"), (7, " or")])
    [('4', '<|user|>'), ('3 characters', '0 4'), ('7', ' or')]
    """
    found: list[tuple[str, str]] = []
    for single, run in groupby(tokens, key=lambda token: len(token[1]) == 1):
        pieces = list(run)
        if single and len(pieces) > 1:
            found.append((f"{len(pieces)} characters", "".join(piece for _, piece in pieces)))
        else:
            found += [(str(token), piece) for token, piece in pieces]
    return found


@dataclass(kw_only=True, slots=True)
class EpisodeRunner:
    """The loop of one trajectory."""

    task: TaskConfig
    env: SingleEnvironment
    player: Player
    view: EpisodeView
    renderer: ChatRenderer | None
    seed: int
    _turns: list[EpisodeTurn] = field(default_factory=list)
    _context: list[int] = field(default_factory=list)

    async def run(self, held_out: bool, run: RunFile) -> RewardResult | None:
        messages = opening = await self.env.reset(self.seed, held_out)
        info: dict[str, object] = {}
        while True:
            self._observe(messages)
            if len(self._context) + self.task.sampling.max_tokens > self.task.max_context:
                room = f"room left for an action of {self.task.sampling.max_tokens}"
                why, truncated = f"truncated: max_context ({self.task.max_context} tokens) has no {room}", True
                break
            action = await self.player.act(len(self._turns), self._context, opening)
            if action is None:
                self.view.show_end(f"you left after {self._count()}", None)
                return None
            self._act(action, opening)
            step = await self.env.step(action.text)
            self.view.show_step(step)
            self._turns.append(EpisodeTurn(tuple(messages), action.text, step.reward, action.reasoning))
            info.update(step.info)
            messages = step.messages
            if step.done or len(self._turns) >= self.task.max_turns:
                why, truncated = self._why(step)
                break
        if not self._turns:
            raise RollartError(
                f"the first observation of task {self.task.name!r} leaves no room for an action in max_context "
                f"{self.task.max_context}; the chat template, the tools and a system prompt count too"
            )
        result = await scored(run, self.task, self.seed, self._turns, truncated=truncated, info=info)
        size = f"; {len(self._context)} tokens in all" if self.renderer else ""
        self.view.show_end(f"{why}{size}", result)
        return result

    def _observe(self, messages: Sequence[Message]) -> None:
        prompt: list[int] = []
        if self.renderer is not None:
            first = not self._context
            prompt = self.renderer.open(messages) if first else self.renderer.extend(self._context[-1], messages)
        self._context += prompt
        self.view.show_observation(messages, prompt)

    def _act(self, action: Action, opening: Sequence[Message]) -> None:
        tokens = action.tokens
        if tokens is None:
            tokens = self.renderer.action(action.text, opening) if self.renderer is not None else []
        self._context += tokens
        self.view.show_action(action, tokens)

    def _why(self, step: Step) -> tuple[str, bool]:
        if step.truncated:
            return f"truncated by the environment after {self._count()}", True
        if step.done:
            return f"finished after {self._count()}", False
        return f"truncated after {self._count()}: max_turns", True

    def _count(self) -> str:
        return f"{len(self._turns)} {'turn' if len(self._turns) == 1 else 'turns'}"


async def scored(
    run: RunFile,
    task: TaskConfig,
    seed: int,
    turns: Sequence[EpisodeTurn],
    *,
    truncated: bool,
    info: dict[str, object],
) -> RewardResult:
    """By the task's reward function, as in a run."""
    episode = Episode(id="play", task=task.name, seed=seed, turns=tuple(turns), truncated=truncated, info=dict(info))
    rewards = Rewards([task], run.rewards, cluster=run.cluster)
    try:
        await rewards.start()
        return await rewards.score(task.name, episode)
    finally:
        await rewards.close()
