"""A request in the engine: its tokens so far, and how many of them have KV in the rows."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from rollart.core.errors import EngineFailed
from rollart.core.expert_choice import ChoiceShape, ExpertChoices
from rollart.core.types import Completion, Finish, GenerationRequest, Sampling, TokenPart
from rollart.engines.torch.prefix_cache import chain
from rollart.engines.torch.sampler import mix_seed


@dataclass(slots=True, eq=False)
class EngineSequence:
    """`tokens` is the prompt and all that was generated; the first `computed` of them have their KV in the row.

    `limit` is the length at which it must end, `blocks` the hash chain of the prompt; without `generates` it ends after
    its prefill. A swap dropped the KV of the first `lost` tokens. `versions` is updated only when they are needed.
    `drawn` random numbers were used before, by the engine that sampled the end of the prompt.
    `first` is the time of its first token. `on_part` gets new tokens, `stream_every` at a time; it got the first
    `streamed` of them. If the engine records experts, `experts` has a row for at least each of the first `computed`
    tokens; those of the first `experts_known` are not returned.
    """

    id: str
    session: str
    tokens: list[int]
    blocks: tuple[int, ...]
    prompt: int
    limit: int
    temperature: float
    top_k: int
    top_p: float
    stop: frozenset[int]
    seed: int
    drawn: int = 0
    experts_known: int = 0
    experts: bytearray = field(default_factory=bytearray)
    experts_shape: ChoiceShape | None = None
    generates: bool = True
    stream_every: int = 0
    streamed: int = 0
    on_part: Callable[[TokenPart], object] | None = None
    computed: int = 0
    cached: int = 0
    fetched: int = 0
    lost: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: str | None = None
    arrived: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0
    first: float = 0.0
    ended: float = 0.0

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    def stamp(self, version: int) -> None:
        """Tokens generated since the last call are of `version`."""
        self.versions.extend([version] * (len(self.logprobs) - len(self.versions)))

    def next_part(self, version: int) -> TokenPart:
        """The tokens that were not streamed yet."""
        self.stamp(version)
        at, self.streamed = self.streamed, len(self.logprobs)
        return TokenPart(self.tokens[self.prompt + at :], self.logprobs[at:], self.versions[at:])

    def record_experts(self, start: int, rows: bytes | memoryview, shape: ChoiceShape) -> None:
        """Of the tokens from `start` on. A row that is there stays: the token was sampled with it."""
        self.experts_shape = shape
        have = len(self.experts) // shape.row
        self.experts += shape.unknown(start - have)
        self.experts += memoryview(rows)[max(0, have - start) * shape.row :]

    def _expert_choices(self) -> ExpertChoices | None:
        shape = self.experts_shape
        if shape is None:
            return None
        start = min(self.experts_known, len(self.experts) // shape.row)
        return ExpertChoices(start, shape, bytes(self.experts[start * shape.row :]))

    def completion(self) -> Completion:
        """Raises EngineFailed if it ended with an error."""
        if self.error is not None or self.finish is None:
            raise EngineFailed(self.error or f"request {self.id!r} has not ended")
        admitted = self.admitted or self.ended
        first = self.first or self.ended
        return Completion(
            tokens=self.tokens[self.prompt :],
            logprobs=self.logprobs,
            versions=self.versions,
            finish=self.finish,
            prompt=self.prompt,
            cached=self.cached,
            fetched=self.fetched,
            queue_s=admitted - self.arrived,
            prefill_s=first - admitted,
            decode_s=self.ended - first,
            experts=self._expert_choices(),
        )


def accepted(request: GenerationRequest, *, vocabulary: int, context: int, seed: int) -> EngineSequence:
    """Checks a request, so that a bad one fails alone. Raises EngineFailed."""
    _check(request, vocabulary, context)
    sampling = request.sampling
    # Greedy is sampling from the single best token, so its logprob is 0.
    greedy = sampling.temperature == 0
    return EngineSequence(
        id=request.id,
        session=request.session,
        tokens=list(request.tokens),
        blocks=chain(request.tokens),
        prompt=len(request.tokens),
        limit=min(len(request.tokens) + sampling.max_tokens, context),
        temperature=1.0 if greedy else sampling.temperature,
        top_k=1 if greedy else sampling.top_k,
        top_p=1.0 if greedy else sampling.top_p,
        stop=frozenset(sampling.stop),
        seed=_seed(request.id, sampling, seed),
        drawn=request.resumed,
        experts_known=request.experts_known,
    )


def _check(request: GenerationRequest, vocabulary: int, context: int) -> None:
    name, tokens, sampling = request.id, request.tokens, request.sampling
    if not tokens:
        raise EngineFailed(f"request {name!r} has no tokens; give at least one")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise EngineFailed(f"request {name!r} has a token outside the model's vocabulary of {vocabulary}")
    if len(tokens) >= context:
        raise EngineFailed(f"request {name!r} has {len(tokens)} tokens, which leaves no room in a context of {context}")
    if sampling.max_tokens < 1 or sampling.temperature < 0 or sampling.top_k < 0 or not 0 < sampling.top_p <= 1:
        raise EngineFailed(
            f"request {name!r} has impossible sampling settings: need max_tokens >= 1, temperature >= 0, "
            f"top_k >= 0 and 0 < top_p <= 1, got {sampling}"
        )


def _seed(name: str, sampling: Sampling, engine_seed: int) -> int:
    """A request without a seed gets one from its id, so that a run can be repeated."""
    if sampling.seed is not None:
        return mix_seed(sampling.seed)
    digest = blake2b(f"{engine_seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
