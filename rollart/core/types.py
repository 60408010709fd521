"""The vocabulary of rollart: records without behaviour.

All are plain records of plain values, so msgspec can carry each of them over a wire or into a file unchanged. Messages
and turns are kept by the million, so they are structs of tuples, which the garbage collector does not scan.
"""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from rollart.core.column import Column
from rollart.core.expert_choice import ExpertChoices
from rollart.core.run_length import lowest
from rollart.core.teaching import Teaching

if TYPE_CHECKING:
    from numpy.typing import NDArray

Finish = Literal["stop", "length", "abort"]


class Outcome(StrEnum):
    """How a trajectory ended. Only the first two are ever trained."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    STALE = "stale"
    CANCELLED = "cancelled"
    ENV_FAILED = "env_failed"
    ENGINE_FAILED = "engine_failed"
    REWARD_FAILED = "reward_failed"

    @property
    def trainable(self) -> bool:
        return self in (Outcome.FINISHED, Outcome.TRUNCATED)


class Message(Struct, frozen=True, gc=False):
    role: str
    content: str


class Step(Struct, frozen=True):
    """What an environment returns for an action. `truncated`: it ended by a limit, not by its own rules."""

    messages: tuple[Message, ...]
    reward: float | None = None
    done: bool = False
    truncated: bool = False
    info: dict[str, Any] = {}


class Sampling(Struct, frozen=True):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(slots=True)  # not frozen, though nobody changes one: that takes four times as long to make
class GenerationRequest:
    """`tokens` is the whole context; `session` names the conversation whose cached prefix may be reused, `kv_from` the
    address of an engine to fetch missing KV from, `branch_of` a conversation that it begins like, `episode` the attempt
    that it serves. The expert choices of the first `experts_known` tokens are known. The last `resumed` tokens were
    sampled by another engine. Contexts of one `conversation`, if not 0, only grow: each begins with those before it."""

    id: str
    session: str
    task: str
    turn: int
    tokens: list[int]
    sampling: Sampling
    kv_from: str | None = None
    branch_of: str = ""
    episode: str = ""
    experts_known: int = 0
    resumed: int = 0
    conversation: int = 0


class TokenPart(Struct, frozen=True, array_like=True):
    """The next tokens of an answer under way, with their logprobs and versions."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


class Completion(Struct, frozen=True, gc=False):
    """`cached` of the `prompt` tokens needed no prefill; `fetched` of these came from another engine. `experts` are
    those that a mixture used, for prompt and tokens but the last, which was not computed with yet."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Finish
    prompt: int = 0
    cached: int = 0
    fetched: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    experts: ExpertChoices | None = None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Counters since the engine's start; `busy_s` is the time inside forward passes, and `late_s`, for an emulated
    device, how much longer they took here than on it. `kv_reserved`: what requests need at their maximum length."""

    version: int
    running: int
    waiting: int
    kv_bytes: int
    kv_budget: int
    prefilled: int
    generated: int
    swaps: int
    busy_s: float
    late_s: float = 0.0
    kv_reserved: int = 0
    emulated: str = ""  # the device


class Publication(Struct, frozen=True):
    """A published version: `sources[shard]` are the URLs to fetch a shard from, best first, if not in the reader's own
    memory; `key` authenticates readers. A version that is published again, after a rollback, has another `id`, and the
    same `digests` of its tensors, in order of their names."""

    version: int
    id: str = ""
    sources: tuple[tuple[str, ...], ...] = ()
    key: str | None = None
    bytes: int = 0
    digests: dict[str, str] = {}


class Hop(Struct, frozen=True):
    """The part of a version that came from one URL: all of it was there `seconds` after the fetch began."""

    source: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """An engine's weight swap: `transfer_s` to fetch and check the weights while generation went on, and `exposed_s` in
    which no step could run, or ran with a smaller batch because requests were drained. `recomputed` tokens of running
    requests had KV of the old weights; `recompute_s` is what that cost after the previous swap, if measured."""

    version: int
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    bytes: int = 0
    transport: str = ""
    recomputed: int = 0
    recompute_s: float = 0.0
    hops: tuple[Hop, ...] = ()  # none: it was in the memory of this host
    relay: str = ""  # the URL at which this process serves to others what it fetched


class Turn(Struct, frozen=True, gc=False):
    """Observation in, action out. `prompt` holds only the tokens that this observation added to the context.

    Turns of one `segment` continue each other. An agent that rewrites its history, or has several conversations, starts
    another segment, whose first prompt is the whole context: what it shares with an earlier one is trained there.
    `experts` are those of the tokens of its segment, if the engine reported them; `reasoning` came before `action`."""

    messages: tuple[Message, ...]
    prompt: tuple[int, ...]
    action: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish
    reward: float | None = None
    generate_s: float = 0.0
    env_s: float = 0.0
    segment: int = 0
    experts: ExpertChoices | None = None
    reasoning: str = ""


class EpisodeTurn(Struct, frozen=True):
    messages: tuple[Message, ...]
    action: str
    reward: float | None = None
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Episode:
    """What a reward function gets: the conversation and the environment's rewards and info."""

    id: str
    task: str
    seed: int
    turns: tuple[EpisodeTurn, ...]
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def env_return(self) -> float:
        return sum(turn.reward or 0.0 for turn in self.turns)


@dataclass(frozen=True, slots=True)
class RewardResult:
    value: float
    parts: dict[str, float] = field(default_factory=dict)
    success: bool | None = None


class CaptureCounts(Struct):
    """What a client did. A fork is a request, after the first, whose context continues no conversation to its end; a
    retry has the same messages as an earlier request. `undelivered` answers, whose client was gone, are never trained.
    `mismatches` are answers whose text, tokenized again, gives other tokens than were sampled."""

    requests: int = 0
    completions: int = 0
    segments: int = 0
    forks: int = 0
    retries: int = 0
    undelivered: int = 0
    mismatches: int = 0


class CapturedEpisode(Struct, frozen=True):
    """An episode as sampled, in order. `truncated`: a limit refused a request; `cut`: the last answer was too long."""

    turns: tuple[Turn, ...]
    counts: CaptureCounts
    truncated: bool = False
    cut: bool = False

    @property
    def limited(self) -> bool:
        """Whether a limit may be why the program ended."""
        return self.truncated or self.cut


class Trajectory(Struct, frozen=True):
    """One attempt at one episode, as the ledger keeps it. `teaching` is a teacher's, one for each segment."""

    id: str
    task: str
    group: str
    member: int
    seed: int
    outcome: Outcome
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    parts: dict[str, float] = {}
    success: bool | None = None
    reason: str = ""
    info: dict[str, Any] = {}
    temperature: float = 1.0
    started_s: float = 0.0
    seconds: float = 0.0
    teaching: tuple[Teaching, ...] = ()

    @property
    def oldest(self) -> int | None:
        """The oldest policy version that sampled one of its tokens."""
        return min([lowest(turn.versions) for turn in self.turns if turn.versions], default=None)

    @property
    def action_tokens(self) -> int:
        return sum([len(turn.tokens) for turn in self.turns])

    @property
    def total_tokens(self) -> int:
        return sum([len(turn.prompt) + len(turn.tokens) for turn in self.turns])


class TokenRole(IntEnum):
    """Where a token of a sample comes from: the first prompt, the policy, or what the environment answered."""

    PROMPT = 0
    ACTION = 1
    OBSERVATION = 2


class TurnSpan(Struct, frozen=True, gc=False, array_like=True):
    """The tokens from `start` to `stop` of a sample are the action of turn `number` of its trajectory. `reward` is the
    environment's; turns of a group with the same `state` saw the same; `done`: the episode ended by its own rules."""

    number: int
    start: int
    stop: int
    reward: float = 0.0
    state: str = ""
    done: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory, or a segment of one, as the trainer gets it: one token sequence. `roles` has the `TokenRole` of
    every token; `logprobs` and `versions` have one entry per action token, sampled at `temperature`. The reward of a
    trajectory's segments counts once. `imitate` has the weight of every token in the cross entropy, if any is imitated.
    `experts` has a row for every token."""

    id: str
    task: str
    tokens: Column
    roles: Column
    logprobs: Column
    versions: Column
    reward: float
    truncated: bool = False
    temperature: float = 1.0
    trajectory: str = ""
    turns: tuple[TurnSpan, ...] = ()
    teacher: Teaching | None = None
    imitate: Column | None = None
    experts: ExpertChoices | None = None

    @property
    def actions(self) -> int:
        """Action tokens."""
        return len(self.logprobs)

    @property
    def mask(self) -> "NDArray[Any]":
        """True at action tokens."""
        actions: NDArray[Any] = self.roles.array == TokenRole.ACTION
        return actions

    @property
    def owner(self) -> str:
        """The trajectory that it is, or is a segment of."""
        return self.trajectory or self.id


@dataclass(frozen=True, slots=True)
class SampleGroup:
    id: str
    task: str
    samples: tuple[Sample, ...]

    @property
    def rewards(self) -> dict[str, float]:
        """By trajectory."""
        return {sample.owner: sample.reward for sample in self.samples}


@dataclass(frozen=True, slots=True)
class Batch:
    """The data of optimizer step `step`, trained on version `step`, giving version `step + 1`."""

    step: int
    groups: tuple[SampleGroup, ...]


class Example(Struct, frozen=True, array_like=True, gc=False):
    """A conversation for supervised training: its tokens, and a mask that is 1 where a token is learnt."""

    tokens: list[int]
    mask: list[int]


@dataclass(frozen=True, slots=True)
class ExampleBatch:
    """The data of supervised step `step`, which counts as a batch's does, and its learning rate."""

    step: int
    rate: float
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """How far the engine's logprobs were from the trainer's, for a task's tokens that are `age` versions old."""

    task: str
    age: int
    tokens: int
    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """`version` is the new version. `warnings` are sentences about what looks wrong to the trainer."""

    version: int
    seconds: float
    tokens: int
    values: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)
    gaps: tuple[LogprobGap, ...] = ()
    warnings: tuple[str, ...] = ()
