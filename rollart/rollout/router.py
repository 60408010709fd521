"""Sends each request to an engine, and to another one if that fails.

Invariants: a request goes only to an engine that is alive, is not draining and has at least version `floor`; if there
is none it waits for as long as the registry has an engine that may come back, and the clock of its episode stands still
meanwhile: whoever restarts engines decides when to give one up. An answer whose engine fails goes on at another one,
from the tokens that there are; it is given up after `attempts` failures without a new token. Cancelling `generate`
aborts the request at the engine. What a request adds to the load of an engine is taken off again, once, however it
ends.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import count

from msgspec import Struct, structs

from rollart.core.errors import EngineFailed, EngineLost
from rollart.core.protocols import TokenStream
from rollart.core.run_length import fingerprint, lowest
from rollart.core.types import Completion, GenerationRequest, Publication, TokenPart
from rollart.rollout.decode_lengths import DecodeLengths
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.engine_state import EngineState
from rollart.rollout.episode_clock import EpisodeClock
from rollart.rollout.routing_policy import MeasuredPolicy, RoutingChoice, RoutingPolicy, RoutingQuery, Why

_FIRST_PROMPTS = 4096
PART_TOKENS = 128  # at most as many are sampled again after the loss of an engine


class Routed(Struct):
    """A completion, the engine and pool that made it, why they were chosen, and the predicted seconds."""

    completion: Completion
    engine: str
    pool: str
    why: Why
    predicted_s: float
    prefilled_by: str = ""


class _CachedAt(Struct):
    """Where a conversation's KV is: `tokens` of it, made by `version`."""

    engine: EngineState
    tokens: int
    version: int


class Answer:
    """What there is of the answer to a request, whichever engines sampled it."""

    def __init__(
        self, request: GenerationRequest, stream: TokenStream | None, on_version: Callable[[int], None] | None
    ) -> None:
        self._request, self._stream, self._on_version = request, stream, on_version
        self._oldest: int | None = None
        self._enough = False
        self.every = PART_TOKENS if stream is None else min(stream.every, PART_TOKENS)
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []

    @property
    def over(self) -> bool:
        """Whether nothing of it is missing, though no engine said so."""
        return self._enough or len(self.tokens) >= self._request.sampling.max_tokens

    def on_part(self, part: TokenPart) -> bool:
        self.tokens += part.tokens
        self._logprobs += part.logprobs
        self._versions += part.versions
        self._report(min(part.versions))
        self._enough = self._stream is not None and self._stream.on_tokens(part.tokens)
        return self._enough

    def _report(self, version: int) -> None:
        if self._on_version is not None and (self._oldest is None or version < self._oldest):
            self._oldest = version
            self._on_version(version)

    def rest(self) -> GenerationRequest:
        """A request for what is missing."""
        if not self.tokens:
            return self._request
        sampling = self._request.sampling
        return replace(
            self._request,
            tokens=[*self._request.tokens, *self.tokens],
            sampling=replace(sampling, max_tokens=sampling.max_tokens - len(self.tokens)),
            resumed=len(self.tokens),
        )

    def join(self, rest: GenerationRequest, completion: Completion) -> Completion:
        """The whole, when `rest` was answered."""
        if completion.versions:
            self._report(lowest(completion.versions))
        if not (kept := rest.resumed):
            return completion
        prompt = completion.prompt - kept
        return structs.replace(
            completion,
            tokens=self.tokens[:kept] + completion.tokens,
            logprobs=self._logprobs[:kept] + completion.logprobs,
            versions=self._versions[:kept] + completion.versions,
            prompt=prompt,
            cached=min(completion.cached, prompt),
            fetched=min(completion.fetched, prompt),
        )

    def completion(self) -> Completion:
        """Of what there is."""
        return Completion(self.tokens, self._logprobs, self._versions, "length", prompt=len(self._request.tokens))


class Router:
    """`affinity` is what the run file declares for each task. `keeps_kv`: KV survives a weight swap."""

    def __init__(
        self,
        engines: EngineRegistry,
        *,
        policy: RoutingPolicy | None = None,
        affinity: Mapping[str, str | tuple[str, ...]] | None = None,
        decode_lengths: DecodeLengths | None = None,
        attempts: int = 3,
        keeps_kv: bool = False,
    ) -> None:
        self.engines = engines
        self._decode_lengths = decode_lengths or DecodeLengths()
        self._policy = policy or MeasuredPolicy()
        self._affinity = dict(affinity or {})
        self._sessions: dict[str, _CachedAt] = {}
        self._prefixes: dict[str, _CachedAt] = {}  # of conversations that are prefilled on an engine of their own
        self._first_prompts: OrderedDict[int, _CachedAt] = OrderedDict()  # a plain dict is slow to lose its first key
        self._in_flight: dict[str, EngineState] = {}  # by session; of several requests of one, the last
        self._conversations = count(1)
        self._attempts, self._keeps_kv = attempts, keeps_kv

    def pool_of(self, session: str) -> str:
        """The pool that answers a request of this conversation now; "" if none does."""
        engine = self._in_flight.get(session)
        return engine.pool.name if engine is not None else ""

    async def load(self, publication: Publication) -> None:
        """Bring every engine to a published version, each as soon as it can."""
        await self.engines.load(publication)

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
        now = asyncio.get_running_loop().time
        while True:
            rest = answer.rest()
            choice = self._choose(rest, now()) or await self._wait_for_engine(rest, clock)
            engine, began = choice.engine, now()
            tokens, max_tokens = len(rest.tokens), rest.sampling.max_tokens  # the caller's list may grow
            prefill_until = self._reserve(choice, rest, began)
            self._in_flight[request.session] = engine
            try:
                completion = await self._attempt(choice, rest, answer)
            except EngineFailed as error:
                self._sessions.pop(request.session, None)
                if isinstance(error, EngineLost):
                    self.engines.lose(engine, str(error))
                if answer.over:
                    return self._routed(choice, answer.completion())
                failures = 1 if len(answer.tokens) > rest.resumed else failures + 1
                if failures >= self._attempts:
                    raise EngineFailed(f"{error} (tried {failures} times)") from error
            else:
                self._record(rest, choice, completion, began=began, prefill_until=prefill_until, ended=now())
                whole = answer.join(rest, completion)
                self._decode_lengths.record(request.task, request.turn, len(whole.tokens))
                return self._routed(choice, whole)
            finally:
                self._in_flight.pop(request.session, None)
                engine.release(tokens, max_tokens)

    async def _attempt(self, choice: RoutingChoice, rest: GenerationRequest, answer: "Answer") -> Completion:
        sent = rest if choice.prefill_at is None else await self._prefill(choice.prefill_at, rest)
        if (streaming := choice.engine.streaming) is None:
            return await choice.engine.client.generate(sent)
        return await streaming.generate_in_parts(sent, answer.every, answer.on_part)

    @staticmethod
    def _routed(choice: RoutingChoice, completion: Completion) -> Routed:
        return Routed(
            completion=completion,
            engine=choice.engine.name,
            pool=choice.engine.pool.name,
            why=choice.why,
            predicted_s=choice.prediction.seconds,
            prefilled_by=choice.prefill_at.name if choice.prefill_at is not None else "",
        )

    def new_conversation(self) -> int:
        """A number that no other conversation with these engines has, that of an earlier attempt of the same name
        included."""
        return next(self._conversations)

    def forget(self, session: str) -> None:
        """The conversation is over."""
        self._sessions.pop(session, None)
        self._prefixes.pop(session, None)

    def _choose(self, request: GenerationRequest, now: float) -> RoutingChoice | None:
        cached_at = self._sessions.get(request.session) or self._sessions.get(request.branch_of)
        cached, shared_at, tokens = 0, None, len(request.tokens)
        if cached_at is not None:
            cached = min(cached_at.tokens, tokens - 1) if self._valid(cached_at) else 0  # a branch may be shorter
        elif request.turn == 0:
            same = self._first_prompts.get(fingerprint(request.tokens))
            shared_at = same.engine if same is not None and self._valid(same) else None
        max_tokens = request.sampling.max_tokens
        query = RoutingQuery(
            task=request.task,
            tokens=tokens,
            decoded=self._decode_lengths.expected(request.task, request.turn, max_tokens),
            max_tokens=max_tokens,
            now=now,
            floor=self.engines.floor,
            affinity=self._affinity.get(request.task, "auto"),
            cached_at=cached_at.engine if cached_at is not None else None,
            cached=cached,
            shared_at=shared_at,
        )
        if (prefix := self._prefixes.get(request.session)) is not None:
            query.prefilled_at, query.prefilled = prefix.engine, prefix.tokens if self._valid(prefix) else 0
        return self._policy.choose(query, self.engines.pools)

    def _valid(self, cached: _CachedAt) -> bool:
        return self._keeps_kv or cached.version == cached.engine.version

    def _reserve(self, choice: RoutingChoice, request: GenerationRequest, now: float) -> float:
        """Count the request where it goes; returns when the prefill there should be done, its own included."""
        engine, tokens = choice.engine, len(request.tokens)
        engine.reserve(tokens, request.sampling.max_tokens)
        engine.pool.expect(choice.prediction.seconds)
        prefilling = choice.prefill_at or engine
        prefilling.add_prefill(choice.prediction.work, now)
        if request.turn == 0:
            if len(self._first_prompts) >= _FIRST_PROMPTS:
                self._first_prompts.popitem(last=False)
            self._first_prompts[fingerprint(request.tokens)] = _CachedAt(engine, tokens - 1, engine.version)
        return prefilling.prefill_until

    async def _prefill(self, engine: EngineState, request: GenerationRequest) -> GenerationRequest:
        """An optimisation: if the prefill fails there, the decoding engine does it itself."""
        tokens = len(request.tokens)
        engine.reserve(tokens, 0)
        try:
            await engine.client.prefill(request)
        except EngineFailed as error:
            if isinstance(error, EngineLost):
                self.engines.lose(engine, str(error))
            return request
        finally:
            engine.release(tokens, 0)
        self._prefixes[request.session] = _CachedAt(engine, tokens - 1, engine.version)
        return replace(request, kv_from=getattr(engine.client, "url", None))

    def _record(
        self,
        request: GenerationRequest,
        choice: RoutingChoice,
        completion: Completion,
        *,
        began: float,
        prefill_until: float,
        ended: float,
    ) -> None:
        engine, pool, made = choice.engine, choice.engine.pool, len(completion.tokens)
        version = completion.versions[-1] if completion.versions else engine.version
        self._sessions[request.session] = _CachedAt(engine, len(request.tokens) + made - 1, version)
        pool.record_request(ended - began)
        if choice.prefill_at is not None or not made:
            return
        first_s, prediction = completion.queue_s + completion.prefill_s, choice.prediction
        prefill_factor, decode_factor = prediction.factors
        if not prediction.room and prediction.wait < prediction.prefill:  # else the queue dominates the measurement
            predicted = (prediction.prefill + prediction.token) / prefill_factor
            pool.record_prefill(predicted, first_s - prediction.wait, completion.prompt - completion.cached)
        pool.record_decode(prediction.token / decode_factor * (made - 1), completion.decode_s, made - 1)
        # Its own prefill was over at its first token; only what came later can be left.
        engine.prefill_until = min(engine.prefill_until, began + first_s + engine.prefill_until - prefill_until)

    async def _wait_for_engine(self, request: GenerationRequest, clock: EpisodeClock | None) -> RoutingChoice:
        now = asyncio.get_running_loop().time
        with clock.paused() if clock is not None else nullcontext():
            while (choice := self._choose(request, now())) is None:
                if self.engines.empty:
                    raise EngineFailed("no engine is left")
                self.engines.revived.clear()
                await self.engines.revived.wait()
        return choice
