"""A gateway in this process: the real application on a real port, with a policy that a test decides."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from rollart.core.errors import EngineFailed
from rollart.core.protocols import TokenStream
from rollart.core.types import Completion, GenerationRequest, Sampling
from rollart.gateway.app import App
from rollart.gateway.http import listening
from rollart.gateway.limits import EpisodeLimits, GatewayLimits
from rollart.gateway.session import SessionTable
from rollart.gateway.template import ChatTemplate
from rollart.models import tiny

KEY = "the-key"


@dataclass
class Policy:
    """Says what it was given, in tokens; without that, random characters. Every request is kept."""

    template: ChatTemplate
    say: Callable[[GenerationRequest], str | None] = lambda request: None
    version: int = 3
    seen: list[tuple[GenerationRequest, Completion]] = field(default_factory=list)
    gate: asyncio.Event | None = None
    pause: asyncio.Event | None = None  # after the first streamed tokens
    lost: bool = False  # all engines, after all tokens
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    cancelled: int = 0

    async def generate(self, request: GenerationRequest, stream: TokenStream | None = None, /) -> Completion:
        self.running += 1
        self.begun.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        said = self.say(request)
        rng = Random(request.sampling.seed)
        if said is None:
            said = "".join(rng.choice("abcdefgh") for _ in range(rng.randint(1, 8)))
        tokens = [*self.template.encode(said), self.template.stop[0]][: request.sampling.max_tokens]
        finish = "stop" if tokens[-1] == self.template.stop[0] else "length"
        if stream is not None:
            streamed = await self._streamed(tokens, finish, stream)
            if self.lost:
                raise EngineFailed("every engine was lost")
            tokens, finish = streamed
        logprobs = [-rng.random() for _ in tokens]
        completion = Completion(tokens, logprobs, [self.version] * len(tokens), finish, len(request.tokens), 0)  # type: ignore[arg-type]
        self.seen.append((request, completion))
        self.answered.set()
        return completion

    async def _streamed(self, tokens: list[int], finish: str, stream: TokenStream) -> tuple[list[int], str]:
        """As an engine would: it hears a token too late that it was enough."""
        for at in range(0, len(tokens), stream.every):
            if stream.on_tokens(tokens[at : at + stream.every]):
                return tokens[: at + stream.every + 1], "length"
            if self.pause is not None:
                await self.pause.wait()
            await asyncio.sleep(0)
        return tokens, finish


def tiny_template(path: Path) -> ChatTemplate:
    tiny.tokenizer(4096).save_pretrained(path)
    return ChatTemplate(path)


def episode_limits(id: str = "episode", **changes: object) -> EpisodeLimits:
    given: dict[str, object] = {
        "id": id,
        "task": "t",
        "seed": 7,
        "sampling": Sampling(max_tokens=512),
        "max_context": 4096,
    }
    return EpisodeLimits(**{**given, **changes})  # type: ignore[arg-type]


@dataclass
class Running:
    url: str
    sessions: SessionTable
    policy: Policy
    app: App


@asynccontextmanager
async def gateway(
    template: ChatTemplate, policy: Policy | None = None, limits: GatewayLimits | None = None, any_model: bool = True
) -> AsyncIterator[Running]:
    """With one key open, `KEY`."""
    policy = policy or Policy(template)
    sessions = SessionTable(template, policy.generate)
    app = App(template, sessions, limits or GatewayLimits(), "policy", any_model)
    sessions.open(KEY, episode_limits())
    async with listening(app, "127.0.0.1") as url:
        yield Running(url, sessions, policy, app)
