"""Players of an episode: a person, the task's scripted player, or a saved model.

The event loop never blocks on the person, so Ctrl-C works at once.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from rollart.config import EngineConfig, TaskConfig
from rollart.core.seeds import seed_of
from rollart.core.types import Finish, GenerationRequest, Sampling
from rollart.envs.single import SingleEnvironment
from rollart.models.chat import ChatRenderer

if TYPE_CHECKING:
    from rollart.engines.torch.engine import TorchEngine

ACT_TIMEOUT = 600.0  # seconds, for a model of any size


@dataclass(frozen=True, slots=True)
class Action:
    """`tokens` are those that a model sampled; None: it was not sampled."""

    text: str
    tokens: list[int] | None = None
    finish: Finish = "stop"


class Player(Protocol):
    async def act(self, turn: int, context: Sequence[int]) -> Action | None:
        """`context` are the tokens so far, empty without a renderer. None: the player leaves."""
        ...


class HumanPlayer:
    """Types a line for each action; the end of the input is leaving."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._typed = b""

    async def act(self, turn: int, context: Sequence[int]) -> Action | None:
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

    async def act(self, turn: int, context: Sequence[int]) -> Action | None:
        return Action(await self.env.scripted(seed_of(self.seed, "player", turn)))


@dataclass(frozen=True, slots=True)
class ModelPlayer:
    """Samples as a run does."""

    engine: "TorchEngine"
    renderer: ChatRenderer
    task: TaskConfig
    seed: int

    async def act(self, turn: int, context: Sequence[int]) -> Action | None:
        seed = seed_of(self.seed, "play", turn)
        sampling = Sampling(**self.task.sampling.model_dump(), stop=self.renderer.stop, seed=seed)
        request = GenerationRequest(f"play/{turn}", "play", self.task.name, turn, list(context), sampling)
        async with asyncio.timeout(ACT_TIMEOUT):
            completion = await self.engine.generate(request)
        return Action(self.renderer.text(completion.tokens), completion.tokens, completion.finish)


@asynccontextmanager
async def load_engine(folder: Path, config: EngineConfig) -> "AsyncIterator[TorchEngine]":
    """An engine in this process."""
    import torch
    from transformers.utils import logging

    from rollart.engines.torch.engine import TorchEngine
    from rollart.engines.torch.model import EngineModel
    from rollart.launch.service import torch_device

    logging.disable_progress_bar()
    torch.set_num_threads(config.threads)
    model = EngineModel.open(folder, getattr(torch, config.dtype), torch_device(config.device, {}))
    async with TorchEngine(model, config) as engine:
        yield engine
