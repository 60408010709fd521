"""What the control plane needs: protocols that real and simulated services implement."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from rollart.core.action import ParsedAction
from rollart.core.teaching import Teaching
from rollart.core.types import (
    Batch,
    CapturedEpisode,
    Completion,
    EngineStatus,
    Episode,
    GenerationRequest,
    LoadResult,
    Message,
    Publication,
    RewardResult,
    Sample,
    Step,
    StepMetrics,
    TokenPart,
)


class Engine(Protocol):
    """Token ids in, token ids out; what the model produced is never tokenized again."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Raises EngineFailed."""
        ...

    async def prefill(self, request: GenerationRequest) -> int:
        """Compute the context's KV for another engine to fetch; returns the tokens computed. Raises EngineFailed."""
        ...

    async def abort(self, request_id: str) -> None: ...

    async def load(self, publication: Publication) -> LoadResult:
        """Fetch a version and swap to it between two steps. Raises EngineFailed, and keeps the version that it has."""
        ...

    async def status(self) -> EngineStatus: ...


class PolicyServers(Protocol):
    """Whatever acts by versions of a policy, as scheduler and training loop see it: the engines of a run, or a policy
    whose actions are no tokens."""

    @property
    def serving(self) -> int:
        """The oldest version that the next action can be of."""
        ...

    @property
    def target(self) -> int:
        """The newest version that it was asked to load."""
        ...

    def subscribe(self, on_change: Callable[[], None], /) -> Callable[[], None]:
        """Call `on_change` whenever `serving` may have moved. Returns what ends the subscription."""
        ...

    def require(self, version: int, /) -> None:
        """From now on only this version and later ones act."""
        ...

    def announce(self, publication: Publication, /) -> None:
        """It is the newest."""
        ...

    async def load(self, publication: Publication, /) -> None:
        """Returns when all act by this version or a later one, or were given up."""
        ...


@dataclass(frozen=True, slots=True)
class TokenStream:
    """A callback: `on_tokens` gets the new tokens, `every` at a time or fewer, and returns True to end the answer
    early. What it got stays valid: if the engine is lost, another one goes on from there."""

    every: int
    on_tokens: Callable[[list[int]], bool]


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that can stream tokens; the others return whole answers."""

    async def generate_in_parts(
        self, request: GenerationRequest, every: int, on_part: Callable[[TokenPart], bool]
    ) -> Completion:
        """As `generate`. `on_part` gets the first token at once and then `every` at a time, but not the last ones. An
        answer that it ended, by returning True, has the finish `length`, and may have more tokens."""
        ...


class Environment(Protocol):
    """What an environment author writes: synchronous, one episode at a time, isolated by our worker.

    An observation is the text of a user message, or a list of `{"role": ..., "content": ...}`. `step` returns
    `(observation, reward or None, done)` or a dict of the fields of `rollart.core.types.Step`.
    """

    def reset(self, seed: int) -> object: ...

    def step(self, action: str) -> object: ...

    def close(self) -> None: ...


class ClaimedEnvironment(Protocol):
    """One environment, exclusive until the claim is released. Every call has a deadline; raises EnvironmentFailed."""

    async def reset(self, seed: int) -> tuple[Message, ...]: ...

    async def step(self, action: str) -> Step: ...


class EnvironmentPool(Protocol):
    def claim(self, task: str, held_out: bool) -> AbstractAsyncContextManager[ClaimedEnvironment]: ...


class Generate(Protocol):
    def __call__(self, request: GenerationRequest, stream: TokenStream | None = None, /) -> Awaitable[Completion]:
        """Raises EngineFailed."""
        ...


class ClaimedAgent(Protocol):
    """A program that drives one episode itself and requests completions."""

    async def play(
        self, id: str, seed: int, held_out: bool, generate: Generate, captured: Callable[[CapturedEpisode], None]
    ) -> Step:
        """The whole episode; returns its reward, if the program gives one. `captured` is called with what was sampled,
        however it ends. Raises EnvironmentFailed, EngineFailed or RewardFailed."""
        ...


class AgentPool(Protocol):
    def claim(self, task: str) -> AbstractAsyncContextManager[ClaimedAgent]: ...


class RewardInvoker(Protocol):
    async def score(self, task: str, episode: Episode) -> RewardResult:
        """Raises RewardFailed; a failure is never a reward of 0."""
        ...


@runtime_checkable
class GroupRewardInvoker(Protocol):
    """Rewards that compare the attempts at an episode with one another."""

    async def score_member(self, task: str, episode: Episode, peers: int) -> RewardResult:
        """Waits until `peers` attempts at the episode are there, and scores them together. Raises RewardFailed."""
        ...


class TeacherInvoker(Protocol):
    async def teach(self, task: str, samples: Sequence[Sample]) -> tuple[Teaching, ...]:
        """What the teacher of the task gives each sample; nothing if it has none. Raises RewardFailed."""
        ...


class Renderer(Protocol):
    """Turns messages into tokens incrementally, so that generated tokens are never tokenized again."""

    stop: tuple[int, ...]

    def open(self, messages: Sequence[Message]) -> list[int]:
        """The first prompt, up to where the policy's first action begins."""
        ...

    def extend(self, last: int, messages: Sequence[Message]) -> list[int]:
        """What follows an action whose last token is `last`: end of turn if missing, `messages`, start of the next."""
        ...

    def may_fit(self, messages: Sequence[Message], tokens: int) -> bool:
        """False if the messages have more than `tokens` tokens; cheap even for long messages."""
        ...

    def read(self, prompt: Sequence[int], tokens: Sequence[int], opening: Sequence[Message]) -> ParsedAction:
        """An action as the environment sees it, without the end-of-turn token and apart from its reasoning. `prompt` is
        what was rendered before it; `opening` are the first messages, which declare tools if there are any."""
        ...


class Trainer(Protocol):
    async def step(self, batch: Batch) -> StepMetrics: ...

    async def publish(self) -> Publication:
        """Write the current version to the weight store; returns where engines fetch it."""
        ...

    async def save(self, path: Path) -> None:
        """Returns when the state is copied; the trainer may go on while it is written. One at a time."""
        ...

    async def saved(self) -> str:
        """Wait until the checkpoint is complete. Returns why it could not be written; empty: it is."""
        ...
