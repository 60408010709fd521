"""One request until it is answered: by one engine, or by several if some fail.

Invariants: an answer whose engine fails goes on at another one, from the tokens that there are; it is given up after
`attempts` failures without a new token. Whatever a route reserved is released once, however the request ends.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from msgspec import Struct, structs

from rollart.core.errors import EngineFailed, EngineLost
from rollart.core.protocols import TokenStream
from rollart.core.run_length import fingerprint, lowest
from rollart.core.types import Completion, GenerationRequest, TokenPart
from rollart.rollout.episode_clock import EpisodeClock
from rollart.rollout.routing_policy import Why

PART_TOKENS = 256  # at most as many are sampled again after the loss of an engine


class Routed(Struct, gc=False):
    """A completion, the engine and pool that made it, why they were chosen, and the predicted seconds."""

    completion: Completion
    engine: str
    pool: str
    why: Why
    predicted_s: float
    prefilled_by: str = ""


class RouteNeed(Struct, frozen=True, gc=False, array_like=True):
    """What decides where a request goes: of its context only the length and, for a first prompt, a `fingerprint`."""

    session: str
    task: str
    turn: int
    tokens: int
    max_tokens: int
    branch_of: str = ""
    fingerprint: int = 0

    @classmethod
    def of(cls, request: GenerationRequest) -> "RouteNeed":
        return cls(
            request.session,
            request.task,
            request.turn,
            len(request.tokens),
            request.sampling.max_tokens,
            request.branch_of,
            fingerprint(request.tokens) if request.turn == 0 else 0,
        )


class ServedRequest(Struct, frozen=True, gc=False, array_like=True):
    """What an engine did for a request, without the tokens: `made` of them, the last by `version`. The whole answer has
    `answer` tokens, those of engines before it included."""

    made: int
    version: int | None
    answer: int
    prompt: int = 0
    cached: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @classmethod
    def of(cls, completion: Completion, before: int) -> "ServedRequest":
        return cls(
            len(completion.tokens),
            completion.versions[-1] if completion.versions else None,
            before + len(completion.tokens),
            completion.prompt,
            completion.cached,
            completion.queue_s,
            completion.prefill_s,
            completion.decode_s,
        )


class Answer:
    """What there is of the answer to a request, whichever engines sampled it: `count` tokens."""

    __slots__ = ("_enough", "_oldest", "_on_version", "_parts", "_request", "_stream", "count", "every")

    def __init__(
        self, request: GenerationRequest, stream: TokenStream | None, on_version: Callable[[int], None] | None
    ) -> None:
        self._request, self._stream, self._on_version = request, stream, on_version
        self._oldest: int | None = None
        self._enough = False
        self.every = PART_TOKENS if stream is None else min(stream.every, PART_TOKENS)
        self._parts: list[TokenPart] = []
        self.count = 0

    @property
    def over(self) -> bool:
        """Whether nothing of it is missing, though no engine said so."""
        return self._enough or self.count >= self._request.sampling.max_tokens

    def on_part(self, part: TokenPart) -> bool:
        self._parts.append(part)
        self.count += len(part.tokens)
        self._report(min(part.versions))
        self._enough = self._stream is not None and self._stream.on_tokens(part.tokens)
        return self._enough

    def _report(self, version: int) -> None:
        if self._on_version is not None and (self._oldest is None or version < self._oldest):
            self._oldest = version
            self._on_version(version)

    def rest(self) -> GenerationRequest:
        """A request for what is missing."""
        if not self.count:
            return self._request
        sampling = self._request.sampling
        return replace(
            self._request,
            tokens=[*self._request.tokens, *(token for part in self._parts for token in part.tokens)],
            sampling=structs.replace(sampling, max_tokens=sampling.max_tokens - self.count),
            resumed=self.count,
        )

    def join(self, rest: GenerationRequest, completion: Completion) -> Completion:
        """The whole, when `rest` was answered."""
        if completion.versions:
            self._report(lowest(completion.versions))
        if not (kept := rest.resumed):
            return completion
        prompt, before = completion.prompt - kept, self.completion()
        return structs.replace(
            completion,
            tokens=before.tokens[:kept] + completion.tokens,
            logprobs=before.logprobs[:kept] + completion.logprobs,
            versions=before.versions[:kept] + completion.versions,
            prompt=prompt,
            cached=min(completion.cached, prompt),
            fetched=min(completion.fetched, prompt),
        )

    def completion(self) -> Completion:
        """Of what there is."""
        return Completion(
            [token for part in self._parts for token in part.tokens],
            [logprob for part in self._parts for logprob in part.logprobs],
            [version for part in self._parts for version in part.versions],
            "length",
            prompt=len(self._request.tokens),
        )


class RequestRouter(Protocol):
    """What a trajectory needs of a router."""

    async def generate(
        self,
        request: GenerationRequest,
        stream: TokenStream | None = None,
        *,
        clock: EpisodeClock | None = None,
        on_version: Callable[[int], None] | None = None,
    ) -> Routed: ...

    def new_conversation(self) -> int:
        """A number that no other conversation with these engines has, that of an earlier attempt of the same name
        included."""
        ...

    def forget(self, session: str) -> None:
        """The conversation is over."""
        ...


R = TypeVar("R")


class RequestLoop(ABC, Generic[R]):
    """The life of a request. `R` is a route: where it goes, and what is reserved for it there."""

    def __init__(self, attempts: int = 3) -> None:
        self._attempts = attempts

    async def generate(
        self,
        request: GenerationRequest,
        stream: TokenStream | None = None,
        *,
        clock: EpisodeClock | None = None,
        on_version: Callable[[int], None] | None = None,
    ) -> Routed:
        """Raises EngineFailed after the last attempt. `on_version` gets the version of the first token at once, and
        older ones of later tokens."""
        answer, failures = Answer(request, stream, on_version), 0
        while True:
            rest = answer.rest()
            need = RouteNeed.of(rest)
            route = self.admit(need) or await self.wait_for_engine(need, clock)
            try:
                completion = await self._attempt(route, rest, answer)
            except EngineFailed as error:
                self.record_failure(route, str(error), isinstance(error, EngineLost))
                if answer.over:
                    return self._routed(route, answer.completion())
                failures = 1 if answer.count > rest.resumed else failures + 1
                if failures >= self._attempts:
                    raise EngineFailed(f"{error} (tried {failures} times)") from error
            else:
                self.record(route, ServedRequest.of(completion, rest.resumed))
                return self._routed(route, answer.join(rest, completion))
            finally:
                self.release(route)

    @abstractmethod
    def admit(self, need: RouteNeed) -> R | None:
        """Where it goes, if that can be decided at once."""

    @abstractmethod
    async def wait_for_engine(self, need: RouteNeed, clock: EpisodeClock | None = None) -> R:
        """Waits while no engine can take it, and `clock` stands still. Raises EngineFailed if none ever will."""

    @abstractmethod
    def _attempt(self, route: R, rest: GenerationRequest, answer: Answer) -> Awaitable[Completion]:
        """Raises EngineFailed when it is awaited."""

    @abstractmethod
    def record_failure(self, route: R, reason: str, lost: bool) -> None:
        """The engine failed; `lost`: for good."""

    @abstractmethod
    def record(self, route: R, served: ServedRequest) -> None:
        """The request was answered."""

    @abstractmethod
    def release(self, route: R) -> None:
        """The request is over there, however it ended."""

    @abstractmethod
    def _routed(self, route: R, completion: Completion) -> Routed: ...
