"""One API key's session, an episode as a rule: its limits, its conversations, what was sampled for it.

The invariants:
- A request is answered from the exact tokens of the conversation that it continues; text that this policy did not
  generate is rendered and belongs to the prompt.
- A response is pending until it is delivered. What was not delivered is not kept: neither trained nor matched.
- At most `limits.max_parallel` requests are under way; more get a 429. Closing a session cancels what is under way.
- Only digests of keys are kept.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Literal

from msgspec.structs import replace

from rollart.core.action import ToolCall
from rollart.core.errors import EngineFailed
from rollart.core.protocols import Generate, TokenStream
from rollart.core.seeds import seed_of
from rollart.core.types import CaptureCounts, CapturedEpisode, Completion, GenerationRequest, Message, Sampling, Turn
from rollart.gateway.detokenizer import IncrementalDetokenizer, cut_at_stop
from rollart.gateway.errors import ApiError, busy, invalid
from rollart.gateway.history import History, digests
from rollart.gateway.limits import EpisodeLimits
from rollart.gateway.messages import ChatMessage, CompletionChoice, CompletionRequest, CompletionResponse
from rollart.gateway.segments import Segment, SegmentClaim, Segments
from rollart.gateway.template import ChatTemplate

# Called with new text of the choice of that index. Returns False to get it again together with the text that follows.
OnText = Callable[[CompletionResponse, int, str], bool]
MAX_RESPONSES = 10_000
STOP_CHECK_TOKENS = 8  # between two looks for a stop string, if the text is not streamed
MAX_SEGMENTS = 256  # of a session that is not recorded


@dataclass(frozen=True, slots=True)
class PendingChoice:
    """One completion that may still not be delivered. The first `used` of its tokens are the response, with the text
    `text`, in which the answer begins at `answer`; `sent` characters of the choice's text were streamed already."""

    claim: SegmentClaim
    completion: Completion
    used: int
    text: str
    answer: int
    choice: CompletionChoice
    message: ChatMessage
    seconds: float
    sent: int


@dataclass(frozen=True, slots=True)
class PendingResponse:
    """A response, and what to record once it is delivered: `new` are the messages that the request adds, if it has
    messages, and `chain` the digests of all its messages."""

    request: CompletionRequest
    response: CompletionResponse
    choices: tuple[PendingChoice, ...]
    new: tuple[Message, ...]
    chain: list[bytes]


class SessionTable:
    """Sessions by the digest of their key."""

    def __init__(self, template: ChatTemplate, generate: Generate) -> None:
        self._template, self._generate = template, generate
        self._sessions: dict[bytes, EpisodeSession] = {}

    def open(self, key: str, limits: EpisodeLimits) -> None:
        """The key is valid from now on."""
        digest = _digest(key)
        if digest in self._sessions:
            raise ValueError("this key is in use already")
        self._sessions[digest] = EpisodeSession(limits, self._template, self._generate)

    def find(self, key: str) -> "EpisodeSession | None":
        return self._sessions.get(_digest(key))

    def close(self, key: str) -> CapturedEpisode:
        """Revokes the key. Raises KeyError if it is not valid."""
        return self._sessions.pop(_digest(key)).close()


def _digest(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()


class EpisodeSession:
    def __init__(self, limits: EpisodeLimits, template: ChatTemplate, generate: Generate) -> None:
        self.limits = limits
        self.counts = CaptureCounts()
        self.truncated = False
        # The latest conversations, by the id of their last response.
        self.responses: dict[str, tuple[ChatMessage, ...]] = {}
        self._template, self._generate = template, generate
        self._segments = Segments(None if limits.record else MAX_SEGMENTS)
        self._history = History(self._segments)
        self._turns: list[Turn] = []
        self._numbers = count()
        self._used = self._open = 0
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed = self._cut_short = False

    # A request

    async def serve(self, request: CompletionRequest, on_text: OnText | None = None) -> PendingResponse:
        """Raises ApiError. Every response must end in `delivered` or `discard`."""
        self._admit(request.n)
        self._used += request.n
        self._open += 1
        try:
            chain = digests(request.messages, request.tools)
            new, context, after, sampling = self._prepare(request, chain)
            self.counts.requests += 1
            self.counts.retries += bool(chain) and self._history.is_retry(chain)
            claims = [self._segments.claim(context, after, new=number > 0) for number in range(request.n)]
            response = CompletionResponse(secrets.token_hex(12), int(time.time()), request.model, context)
            choices = await self._choices(request, response, claims, sampling, on_text)
        except BaseException:
            self._used -= request.n
            raise
        finally:
            self._open -= 1
        response.choices = [each.choice for each in choices]
        response.cached = min(choices[0].completion.cached, len(context))
        return PendingResponse(request, response, tuple(choices), new, chain)

    def delivered(self, pending: PendingResponse) -> None:
        request = pending.request
        for each in pending.choices:
            fresh = each.claim.segment.turns == 0
            self.counts.segments += fresh
            self.counts.forks += fresh and self.counts.segments > 1
            position = self._segments.keep(each.claim, each.completion, each.used)
            if request.messages:
                self._history.record(pending.chain, each.message, position)
            elif request.text is not None:
                self._history.record_text(request.text + each.message.text, position)
            if self.limits.record and not self._closed:
                self._turns.append(self._turn(pending, each))
        self.counts.completions += len(pending.choices)
        self._cut_short = any(each.choice.finish == "length" for each in pending.choices)

    def discard(self, pending: PendingResponse) -> None:
        """The client disconnected before it had it all."""
        for each in pending.choices:
            self._segments.drop(each.claim)
        self.counts.undelivered += len(pending.choices)

    def remember(self, id: str, conversation: tuple[ChatMessage, ...]) -> None:
        """For clients that name a response instead of repeating the conversation."""
        self.responses[id] = conversation
        if len(self.responses) > MAX_RESPONSES:
            del self.responses[next(iter(self.responses))]

    def count_tokens(self, request: CompletionRequest) -> int:
        return len(self._context(request, digests(request.messages, request.tools))[1])

    def close(self) -> CapturedEpisode:
        """Responses delivered after this are not captured."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        return CapturedEpisode(tuple(self._turns), self.counts, self.truncated, self._cut_short)

    # The context

    def _admit(self, n: int) -> None:
        if self._closed:
            raise ApiError(401, "this key was revoked: its episode is over", code="invalid_api_key")
        if self.limits.max_calls is not None and self._used + n > self.limits.max_calls:
            self.truncated = True
            raise invalid(f"this episode has had its {self.limits.max_calls} completions", code="max_calls_exceeded")
        if self._open >= self.limits.max_parallel:
            raise busy(f"this key has {self._open} requests under way, its limit; wait for one to end")

    def _prepare(
        self, request: CompletionRequest, chain: list[bytes]
    ) -> tuple[tuple[Message, ...], list[int], Segment | None, Sampling]:
        try:
            new, context, after = self._context(request, chain)
            return new, context, after, self.limits.sampling_for(request, self._template.stop, len(context))
        except ApiError as error:
            self.truncated = self.truncated or error.code == "context_length_exceeded"
            raise

    def _context(
        self, request: CompletionRequest, chain: list[bytes]
    ) -> tuple[tuple[Message, ...], list[int], Segment | None]:
        """The new messages, the tokens of the whole context, and the segment that they continue."""
        template = self._template
        if request.tokens is not None:
            if not all(0 <= token < template.size for token in request.tokens):
                raise invalid(f"a token is a number from 0 to {template.size - 1}", "token_ids")
            return (), request.tokens, None
        if request.text is not None:
            known, position = self._history.find_text(request.text)
            self._fits((Message("prompt", request.text),))
            if position is None:
                return (), template.encode(request.text), None
            before = position.tokens[:-1] if position.ended else position.tokens  # the client's text has no end of turn
            return (), before + template.encode(request.text[known:]), position.segment
        known, position = self._history.find(request.messages, chain)
        if position is None:
            new = self._fits(template.plain_messages(request.messages, request.tools))
            context = template.first_prompt(request.messages, request.tools)
        else:
            rest = request.messages[known:]
            new = self._fits(template.plain_messages(rest), position.length)
            context = position.tokens + template.next_prompt(position.tokens[-1], rest, request.tools)
        if prefix := self._forced_prefix(request):
            context = context + template.encode(prefix)
        return new, context, position.segment if position is not None else None

    def _forced_prefix(self, request: CompletionRequest) -> str:
        """How the response is made to begin; part of the prompt."""
        return request.prefix if request.force is None else self._template.format.begin(request.force)

    def _separates(self, request: CompletionRequest) -> bool:
        """Whether the reasoning is separated: not in a text that is continued, nor in a call that is forced."""
        return bool(request.messages) and request.force is None and not request.prefix

    def _fits(self, messages: tuple[Message, ...], before: int = 0) -> tuple[Message, ...]:
        """Returns `messages`. Raises ApiError if they are far too long: rendering them would block the gateway."""
        if not self._template.may_fit(messages, self.limits.max_context - before):
            raise self.limits.too_long(f"{sum(len(message.content) for message in messages):,} more characters")
        return messages

    # Generation

    async def _choices(
        self,
        request: CompletionRequest,
        response: CompletionResponse,
        claims: Sequence[SegmentClaim],
        sampling: Sampling,
        on_text: OnText | None,
    ) -> list[PendingChoice]:
        """All or none."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            choices = [
                self._choice(request, response, claim, index, sampling=sampling, on_text=on_text)
                for index, claim in enumerate(claims)
            ]
            if len(choices) == 1:
                return [await choices[0]]
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(choice) for choice in choices]
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

    async def _choice(
        self,
        request: CompletionRequest,
        response: CompletionResponse,
        claim: SegmentClaim,
        index: int,
        *,
        sampling: Sampling,
        on_text: OnText | None,
    ) -> PendingChoice:
        limits, number = self.limits, next(self._numbers)
        seed = seed_of(limits.id, limits.seed, number) if sampling.seed is None else sampling.seed + index
        generation = GenerationRequest(
            id=f"{limits.id}/{number}",
            session=f"{limits.id}~{claim.segment.number}",
            task=limits.task,
            turn=claim.segment.turns,
            tokens=claim.context,
            sampling=replace(sampling, seed=seed % 2**31),
            episode=limits.id,
            branch_of="" if claim.branch_of is None else f"{limits.id}~{claim.branch_of.number}",
            experts_known=max(0, claim.known - 1),  # the last known token was sampled, not computed with
        )
        streams, text = on_text is not None and request.force is None, None
        if streams or request.stop:
            call_start = self._template.format.call_start if request.tools and request.parse_calls else None
            split = self._template.splitter(claim.context) if self._separates(request) else None
            text = IncrementalDetokenizer(self._template.text, request.stop, call_start, split)

        def on_tokens(tokens: list[int]) -> bool:
            assert text is not None
            text.add(tokens)
            response.reasoning[index] = text.reasoning
            if on_text is not None and streams and (unsent := text.unsent()) and on_text(response, index, unsent):
                text.sent += len(unsent)
            return text.stopped

        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            every = 1 if streams else STOP_CHECK_TOKENS
            stream = TokenStream(every, on_tokens) if text is not None else None
            completion = await self._generate(generation, stream)
        except EngineFailed as error:
            raise ApiError(503, f"no engine could answer: {error}", code="engine_failed", retry_after=1) from error
        if completion.finish == "abort" or not completion.tokens:
            raise ApiError(503, "the engine aborted this request", code="engine_failed", retry_after=1)
        return self._read(request, claim, completion, clock() - start, text.sent if text is not None else 0)

    def _read(
        self, request: CompletionRequest, claim: SegmentClaim, completion: Completion, seconds: float, sent: int
    ) -> PendingChoice:
        """The completion as the client will see it."""
        text, end, used, stopped_by = cut_at_stop(self._template.text, completion.tokens, request.stop)
        ended = stopped_by is not None or completion.finish == "stop"
        split = self._template.splitter(claim.context) if self._separates(request) else None
        reasoning, start = split(text[:end]) if split is not None else ("", 0)
        whole = text[start:end] if request.force is None else self._forced_prefix(request) + text[:end]
        calls: tuple[ToolCall, ...] = ()
        if request.tools and request.parse_calls:
            whole, found = self._template.format.read(whole, request.tools)
            calls = tuple(ToolCall(name, arguments, f"call_{secrets.token_hex(12)}") for name, arguments in found)
        finish: Literal["stop", "length"] = "stop" if ended else "length"
        tokens, logprobs = completion.tokens[:used], completion.logprobs[:used]
        choice = CompletionChoice(
            text=whole,
            calls=calls,
            finish=finish,
            stopped_by=stopped_by,
            tokens=tokens,
            logprobs=logprobs,
            reasoning=reasoning,
        )
        message = ChatMessage("assistant", request.prefix + whole, calls)
        return PendingChoice(
            claim=claim,
            completion=completion,
            used=used,
            text=text,
            answer=start,
            choice=choice,
            message=message,
            seconds=seconds,
            sent=sent,
        )

    def _turn(self, pending: PendingResponse, choice: PendingChoice) -> Turn:
        completion, used, template = choice.completion, choice.used, self._template
        tokens, whole = completion.tokens[:used], used == len(completion.tokens)
        sampled = tokens[:-1] if completion.finish == "stop" and whole else tokens
        self.counts.mismatches += template.encode(choice.text) != sampled
        return Turn(
            messages=pending.new or (Message("prompt", template.text(choice.claim.prompt)),),
            prompt=tuple(choice.claim.prompt),
            action=choice.text[choice.answer :],
            reasoning=choice.choice.reasoning,
            tokens=tuple(tokens),
            logprobs=tuple(completion.logprobs[:used]),
            versions=tuple(completion.versions[:used]),
            finish=completion.finish if whole else "length",
            generate_s=choice.seconds,
            segment=choice.claim.segment.number,
            experts=None if completion.experts is None else completion.experts.cut(len(choice.claim.context) + used),
        )
