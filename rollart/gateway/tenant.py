"""One holder of a key, an episode as a rule: what it may ask, what it was answered, and nothing of any other.

The invariants:
- A request is answered from the exact tokens of the conversation that it continues; text that this holder was never
  given is rendered and belongs to the prompt.
- An answer is a claim until it is delivered. What was not delivered is not kept: it is neither trained nor matched.
- At most `terms.parallel` requests are under way; more are told to wait. Closing a tenant cancels what is under way.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from rollart.core.errors import EngineFailed
from rollart.core.protocols import Generate, TokenStream
from rollart.core.seeds import seed_of
from rollart.core.types import CaptureCounts, CapturedEpisode, Completion, GenerationRequest, Message, Sampling, Turn
from rollart.gateway.drawing import sampling_of, too_long
from rollart.gateway.errors import ApiError, busy, invalid
from rollart.gateway.history import History, digests
from rollart.gateway.messages import (
    ChatMessage,
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    EpisodeLimits,
    ToolCall,
)
from rollart.gateway.segments import Claim, Segment, Segments
from rollart.gateway.template import ChatTemplate
from rollart.gateway.transcript import Transcript, cut

# Text of an answer that is being made, of the choice of that index; False: not now, bring it with what comes next.
Hear = Callable[[CompletionResponse, int, str], bool]
REMEMBERED = 10_000
STRIDE = 8  # tokens between two looks for a stop string, where nobody is shown the text meanwhile
KEPT = 256  # conversations of a holder whose answers are not recorded


@dataclass(frozen=True, slots=True)
class Draft:
    """One completion, before anybody knows whether it will be delivered; `used` of its tokens are the answer and
    say `text`; `shown` characters of the choice's text were streamed already."""

    claim: Claim
    completion: Completion
    used: int
    text: str
    choice: CompletionChoice
    said: ChatMessage
    seconds: float
    shown: int


@dataclass(frozen=True, slots=True)
class Served:
    """An answer, and what there is to keep once it is delivered: `new` are the messages that it adds, if it came as
    messages, and `chain` the digests of all that it answers."""

    ask: CompletionRequest
    answer: CompletionResponse
    drafts: tuple[Draft, ...]
    new: tuple[Message, ...]
    chain: list[bytes]


class Tenant:
    def __init__(self, terms: EpisodeLimits, template: ChatTemplate, generate: Generate) -> None:
        self.terms = terms
        self.counts = CaptureCounts()
        self.truncated = False
        self.responses: dict[
            str, tuple[ChatMessage, ...]
        ] = {}  # conversations by the id of their last answer, the last few
        self._template, self._generate = template, generate
        self._segments = Segments(None if terms.record else KEPT)
        self._history = History(self._segments)
        self._turns: list[Turn] = []
        self._numbers = count()
        self._used = self._open = 0
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed = self._cut_short = False

    # A request

    async def serve(self, ask: CompletionRequest, hear: Hear | None = None) -> Served:
        """Raises ApiError. Every answer must be given to `delivered` or `lost` in the end."""
        self._admit(ask.n)
        self._used += ask.n
        self._open += 1
        try:
            chain = digests(ask.messages, ask.tools)
            new, context, after, sampling = self._prepared(ask, chain)
            self._count(chain)
            claims = [self._segments.claim(context, after, anew=number > 0) for number in range(ask.n)]
            answer = CompletionResponse(secrets.token_hex(12), int(time.time()), ask.model, context)
            drafts = await self._drafts(ask, answer, claims, sampling, hear)
        except BaseException:
            self._used -= ask.n
            raise
        finally:
            self._open -= 1
        answer.choices = [draft.choice for draft in drafts]
        answer.cached = min(drafts[0].completion.cached, len(context))
        return Served(ask, answer, tuple(drafts), new, chain)

    def delivered(self, served: Served) -> None:
        """The client has it all."""
        ask = served.ask
        for draft in served.drafts:
            fresh = draft.claim.segment.turns == 0
            self.counts.segments += fresh
            self.counts.forks += fresh and self.counts.segments > 1
            position = self._segments.keep(draft.claim, draft.completion, draft.used)
            if ask.messages:
                self._history.answered(served.chain, draft.said, position)
            elif ask.text is not None:
                self._history.answered_text(ask.text + draft.said.text, position)
            if self.terms.record and not self._closed:
                self._turns.append(self._turn(served, draft))
        self.counts.completions += len(served.drafts)
        self._cut_short = any(draft.choice.finish == "length" for draft in served.drafts)

    def lost(self, served: Served) -> None:
        """The client was gone before it had it all."""
        for draft in served.drafts:
            self._segments.drop(draft.claim)
        self.counts.undelivered += len(served.drafts)

    def remember(self, id: str, conversation: tuple[ChatMessage, ...]) -> None:
        """For a client that names an answer instead of repeating what was said."""
        self.responses[id] = conversation
        if len(self.responses) > REMEMBERED:
            del self.responses[next(iter(self.responses))]

    def count_tokens(self, ask: CompletionRequest) -> int:
        return len(self._context(ask, digests(ask.messages, ask.tools))[1])

    def close(self) -> CapturedEpisode:
        """No answer counts from here on."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        return CapturedEpisode(tuple(self._turns), self.counts, self.truncated, self._cut_short)

    # What stands before the answer

    def _admit(self, n: int) -> None:
        if self._closed:
            raise ApiError(401, "this key was revoked: its episode is over", code="invalid_api_key")
        if self._used + n > self.terms.calls:
            self.truncated = True
            raise invalid(f"this episode has had its {self.terms.calls} completions", code="max_calls_exceeded")
        if self._open >= self.terms.parallel:
            raise busy(f"this key has {self._open} requests under way, as many as it may; wait for one to end")

    def _count(self, chain: list[bytes]) -> None:
        self.counts.requests += 1
        if chain and self._history.asked(chain):
            self.counts.retries += 1

    def _prepared(
        self, ask: CompletionRequest, chain: list[bytes]
    ) -> tuple[tuple[Message, ...], list[int], Segment | None, Sampling]:
        try:
            new, context, after = self._context(ask, chain)
            return new, context, after, sampling_of(ask, self.terms, self._template.stop, len(context))
        except ApiError as error:
            self.truncated = self.truncated or error.code == "context_length_exceeded"
            raise

    def _context(
        self, ask: CompletionRequest, chain: list[bytes]
    ) -> tuple[tuple[Message, ...], list[int], Segment | None]:
        """The messages that are new, all tokens up to where the model goes on, and the segment that they are from."""
        template = self._template
        if ask.tokens is not None:
            if not all(0 <= token < template.size for token in ask.tokens):
                raise invalid(f"a token is a number from 0 to {template.size - 1}", "token_ids")
            return (), ask.tokens, None
        if ask.text is not None:
            known, position = self._history.find_text(ask.text)
            self._fits((Message("prompt", ask.text),))
            if position is None:
                return (), template.encode(ask.text), None
            before = position.tokens[:-1] if position.ended else position.tokens  # the client's text has no end of turn
            return (), before + template.encode(ask.text[known:]), position.segment
        known, position = self._history.find(ask.messages, chain)
        if position is None:
            new = self._fits(template.flat(ask.messages, ask.tools))
            context = template.opening(ask.messages, ask.tools)
        else:
            rest = ask.messages[known:]
            new = self._fits(template.flat(rest), position.length)
            context = position.tokens + template.following(position.ended, rest, ask.tools)
        beginning = self._beginning(ask)
        if beginning:
            context = context + template.encode(beginning)
        return new, context, position.segment if position is not None else None

    def _beginning(self, ask: CompletionRequest) -> str:
        """What is put into the model's mouth."""
        return ask.prefix if ask.force is None else self._template.format.begin(ask.force)

    def _fits(self, messages: tuple[Message, ...], before: int = 0) -> tuple[Message, ...]:
        """The same, if rendering them is worth it: a text that is far too long would take the gateway from all others.
        Raises ApiError."""
        if not self._template.may_fit(messages, self.terms.max_context - before):
            raise too_long(f"{sum(len(message.content) for message in messages):,} more characters", self.terms)
        return messages

    # The answer

    async def _drafts(
        self,
        ask: CompletionRequest,
        answer: CompletionResponse,
        claims: Sequence[Claim],
        sampling: Sampling,
        hear: Hear | None,
    ) -> list[Draft]:
        """All or none; a client that gives up gives up all of them."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            drafts = [self._draft(ask, answer, claim, sampling, index, hear) for index, claim in enumerate(claims)]
            if len(drafts) == 1:
                return [await drafts[0]]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(draft) for draft in drafts]
            return [each.result() for each in tasks]
        except BaseException as error:
            for claim in claims:
                self._segments.drop(claim)
            if isinstance(error, asyncio.CancelledError) and self._closed:
                task.uncancel()
                raise ApiError(401, "this key was revoked: its episode is over", code="invalid_api_key") from None
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        finally:
            self._tasks.discard(task)

    async def _draft(
        self,
        ask: CompletionRequest,
        answer: CompletionResponse,
        claim: Claim,
        sampling: Sampling,
        index: int,
        hear: Hear | None,
    ) -> Draft:
        """The one of this index among the answers to a request."""
        terms, number = self.terms, next(self._numbers)
        seed = seed_of(terms.id, terms.seed, number) if sampling.seed is None else sampling.seed + index
        request = GenerationRequest(
            id=f"{terms.id}/{number}",
            session=f"{terms.id}~{claim.segment.number}",
            task=terms.task,
            turn=claim.segment.turns,
            tokens=claim.context,
            sampling=replace(sampling, seed=seed % 2**31),
            episode=terms.id,
            branch_of="" if claim.branch_of is None else f"{terms.id}~{claim.branch_of.number}",
        )
        shows = hear is not None and ask.force is None
        script = self._transcript(ask) if shows or ask.stop else None

        def heard(tokens: list[int]) -> bool:
            assert script is not None
            script.add(tokens)
            if hear is not None and shows and (fresh := script.fresh()) and hear(answer, index, fresh):
                script.shown += len(fresh)
            return script.over

        def on_restart() -> None:
            assert script is not None
            if script.shown:
                raise EngineFailed("an engine was lost when a part of its answer had been shown")
            script.clear()

        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            listener = TokenStream(1 if shows else STRIDE, heard, on_restart) if script is not None else None
            completion = await self._generate(request, listener)
        except EngineFailed as error:
            raise ApiError(503, f"no engine could answer: {error}", code="engine_failed", retry_after=1) from error
        if completion.finish == "abort" or not completion.tokens:
            raise ApiError(503, "the engine gave this request up", code="engine_failed", retry_after=1)
        return self._read(ask, claim, completion, clock() - start, script.shown if script is not None else 0)

    def _transcript(self, ask: CompletionRequest) -> Transcript:
        held = self._template.format.held if ask.tools and ask.calls else None
        return Transcript(self._template.text, ask.stop, held)

    def _read(self, ask: CompletionRequest, claim: Claim, completion: Completion, seconds: float, shown: int) -> Draft:
        """The completion as the client is to see it."""
        text, end, used, stopped_by = cut(self._template.text, completion.tokens, ask.stop)
        ended = stopped_by is not None or completion.finish == "stop"
        whole = self._beginning(ask) + text[:end] if ask.force is not None else text[:end]
        calls: tuple[ToolCall, ...] = ()
        if ask.tools and ask.calls:
            whole, found = self._template.format.read(whole, ask.tools)
            calls = tuple(ToolCall(name, arguments, f"call_{secrets.token_hex(12)}") for name, arguments in found)
        choice = CompletionChoice(
            whole,
            calls,
            "stop" if ended else "length",
            stopped_by,
            completion.tokens[:used],
            completion.logprobs[:used],
        )
        said = ChatMessage("assistant", ask.prefix + whole, calls)
        return Draft(claim, completion, used, text, choice, said, seconds, shown)

    def _turn(self, served: Served, draft: Draft) -> Turn:
        completion, used, template = draft.completion, draft.used, self._template
        tokens, whole = completion.tokens[:used], used == len(completion.tokens)
        sampled = tokens[:-1] if completion.finish == "stop" and whole else tokens
        self.counts.mismatches += template.encode(draft.text) != sampled
        return Turn(
            served.new or (Message("prompt", template.text(draft.claim.prompt)),),
            tuple(draft.claim.prompt),
            draft.text,
            tuple(tokens),
            tuple(completion.logprobs[:used]),
            tuple(completion.versions[:used]),
            completion.finish if whole else "length",
            generate_s=draft.seconds,
            segment=draft.claim.segment.number,
        )
