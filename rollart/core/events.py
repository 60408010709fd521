"""The events of a run: every state change is one typed event, and all views derive from them.

`t` is seconds since the run began, across resumes; the log sets it. Durations end at `t`.
"""

from math import isfinite
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Union

import msgspec

from rollart.core.types import EngineStatus, Hop, LogprobGap, Outcome


class Event(msgspec.Struct, tag_field="kind", tag=True, kw_only=True):
    t: float = 0.0


class RunStarted(Event):
    """`wall` is the wall-clock time, in seconds since 1970. `emulated` are the pools with emulated devices. `packages`
    are versions, `digest` is that of the run file, and `commit` that of rollart, if it runs from a checkout."""

    name: str
    preset: str
    alpha: int
    seed: int
    steps: int
    tasks: list[str]
    version: int = 0
    resumed: bool = False
    wall: float = 0.0
    emulated: list[str] = []
    model: str = ""
    packages: dict[str, str] = {}
    digest: str = ""
    commit: str = ""
    price: float = 0.0  # of all devices per hour; one H20 is 1
    work: str = "train"  # or sft, dpo, eval, sample, imitation, tuning: there is RL in the first and the last alone


class RunEnded(Event):
    version: int
    reason: str


class ServiceStarted(Event):
    role: str
    name: str
    pid: int
    seconds: float
    node: str = ""
    address: str = ""
    details: dict[str, str] = {}  # of the trainer: what its results depend on


class Placed(Event):
    """Where a worker runs: the device class that its pool `wanted`, the one it got, its node, and why."""

    role: str
    pool: str
    name: str
    wanted: str
    device: str
    node: str
    why: str


class RolledBack(Event):
    """The trainer was lost and continues from its checkpoint of `version`."""

    version: int
    reason: str


class ServiceEnded(Event):
    role: str
    name: str
    reason: str


class WarmupStep(Event):  # of the supervised start
    step: int
    steps: int
    loss: float


class GroupStarted(Event):
    group: str
    task: str
    seed: int
    members: int
    version: int


class GroupReady(Event):
    """`reward` is the mean and `spread` the deviation of its trajectories: without spread, a group teaches nothing."""

    group: str
    task: str
    seconds: float
    reward: float | None = None
    spread: float | None = None


class GroupDropped(Event):
    """A group that will not be trained, and the number of its trainable trajectories."""

    group: str
    task: str
    reason: str
    trajectories: int


class Quarantined(Event):
    """A task that keeps failing leaves the mixture; it is probed after `wait_s`."""

    task: str
    reason: str
    wait_s: float


class Released(Event):
    """A task that was quarantined for `seconds` works again and is back in the mixture."""

    task: str
    seconds: float


class TrajectoryStarted(Event):
    trajectory: str
    task: str
    group: str
    version: int
    held_out: bool = False


class PhasesChanged(Event):
    """By phase, the trajectories that entered it since the last event of this kind and are still in it: the starts of
    turns, environment steps and scoring. Sampled, so short turns cost nothing and thousands of long ones one event."""

    phases: dict[str, list[str]]
    pools: dict[str, list[int]] = {}  # which of "generating" each pool answers, by their places there


class EnvironmentReset(Event):
    trajectory: str
    task: str
    seconds: float


class ResetHedged(Event):
    """A slow reset got a second one in parallel; `won` if the second succeeded first."""

    task: str
    won: bool


class EnvironmentLost(Event):
    """A call failed or missed its deadline; the environment's process was killed. A reset may be `retried`."""

    task: str
    call: Literal["reset", "step"]
    reason: str
    retried: bool = False


class TurnDone(Event):
    """Generation of `generate_s`, then an environment step of `env_s`, ended at `t`. `why` the request went to the
    engine; `fetched` of the cached tokens came from the engine `prefilled_by`, or from the conversation's last one."""

    trajectory: str
    task: str
    turn: int
    engine: str
    prompt: int
    cached: int
    tokens: int
    version: int
    queue_s: float
    generate_s: float
    env_s: float
    pool: str = ""
    why: str = ""
    predicted_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    fetched: int = 0
    prefilled_by: str = ""


class Scored(Event):
    trajectory: str
    task: str
    seconds: float


class RewardCalled(Event):
    """The cost of one score, successful or not. `billed_s` is what the platform charges for; `cold`: the function
    had to start first; `first_byte_s` of the last response; `hedges` are second requests."""

    CANCELLED: ClassVar[str] = "it was cancelled"  # the reason of a cancelled call, which is not a failure
    trajectory: str
    task: str
    function: str
    invoker: str
    seconds: float
    tries: int
    hedges: int = 0
    cold: bool = False
    first_byte_s: float = 0.0
    billed_s: float = 0.0
    reason: str = ""


class AgentPlayed(Event):
    """The requests of an agent in one episode; see `rollart.core.types.CaptureCounts`."""

    trajectory: str
    task: str
    requests: int
    completions: int
    segments: int
    forks: int
    retries: int
    undelivered: int
    mismatches: int
    held_out: bool = False


class TrajectoryEnded(Event):
    """`action_tokens` of its `tokens` were sampled; `parts` are those of the reward."""

    trajectory: str
    task: str
    group: str
    outcome: Outcome
    turns: int
    tokens: int
    seconds: float
    reward: float | None = None
    success: bool | None = None
    reason: str = ""
    held_out: bool = False
    action_tokens: int = 0
    parts: dict[str, float] = {}


class BatchTaken(Event):
    """`ids` are its groups, `groups` their number by task, `staleness` trajectories by age of the oldest token."""

    step: int
    ids: list[str]
    groups: dict[str, int]
    trajectories: int
    tokens: int
    waited_s: float
    staleness: dict[int, int]
    members: list[dict[int, int]] = []  # of each group in the order of training, with a checksum of their samples


class StepDone(Event):
    """The optimizer step that gave `version`. `gaps` between the engine's logprobs and the trainer's. Values that are
    not finite are left out: the trainer warns of the step that it skips for them."""

    version: int
    seconds: float
    tokens: int
    values: dict[str, float]
    tasks: dict[str, dict[str, float]]
    gaps: tuple[LogprobGap, ...] = ()

    def __post_init__(self) -> None:
        self.values = finite(self.values)
        self.tasks = {task: finite(values) for task, values in self.tasks.items()}


class Published(Event):
    """`bytes` is the size of the whole version, if the trainer reported it."""

    version: int
    seconds: float
    bytes: int = 0
    digests: str = ""  # of its tensors, in order of their names: 8 digits each


class EngineSwapped(Event):
    """`seconds` from the order to the swap; the other fields are those of `rollart.core.types.LoadResult`."""

    engine: str
    version: int
    seconds: float
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    bytes: int = 0
    transport: str = ""
    recomputed: int = 0
    recompute_s: float = 0.0
    hops: tuple[Hop, ...] = ()
    relay: str = ""


class EngineSample(Event):
    """Counters since the engine's start, sampled. Which device the engine runs on is in its `Placed` event."""

    engine: str
    version: int
    running: int
    waiting: int
    kv_bytes: int
    prefilled: int
    generated: int
    busy_s: float
    late_s: float = 0.0
    kv_budget: int = 0
    kv_reserved: int = 0
    swaps: int = 0

    @classmethod
    def of(cls, engine: str, status: EngineStatus) -> "EngineSample":
        counters = {name: getattr(status, name) for name in cls.__struct_fields__ if name not in ("t", "engine")}
        return cls(engine=engine, **counters)


class PipelineSample(Event):
    """Trajectories by stage; by task, those under way and those ready; environments in use and processes for them."""

    running: int
    scoring: int
    ready: int
    training: int
    environments: int
    processes: int
    tasks: dict[str, tuple[int, int]] = {}


class HostSample(Event):  # a machine
    node: str
    cpu: float  # share of its cores that is busy
    cores: int
    memory: int  # in use
    memory_total: int
    gpus: list[tuple[float, int, int]] = []  # of each: share busy, bytes in use, bytes in all


class GatewaySample(Event):  # episodes that are open at the gateway, and their requests in flight
    sessions: int
    requests: int


class WorkStarted(Event):
    """Held-out episodes of every task begin at `version`, or its checkpoint; `Evaluated` or `Checkpointed` follows."""

    work: Literal["evaluation", "checkpoint"]
    version: int


class Evaluated(Event):
    """Held-out episodes, started at `version`; later versions may play the rest. `failed` ones are not in `success`."""

    version: int
    task: str
    episodes: int
    success: float
    reward: float
    failed: int
    final: bool = False
    samples: int = 1  # of each episode; `episodes` counts them all
    passed: float | None = None  # share of episodes with a sample that succeeded (pass@k)


class Checkpointed(Event):
    """A checkpoint is complete `seconds` after it was begun; training waited for `blocked_s` of them."""

    version: int
    seconds: float
    blocked_s: float = 0.0


class Warned(Event):
    message: str


if TYPE_CHECKING:
    AnyEvent = Event
else:  # what msgspec decodes: one of the classes above, by its `kind`
    AnyEvent = Union[tuple(Event.__subclasses__())]  # noqa: UP007


def finite(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isfinite(value)}


class EventSink(Protocol):
    def emit(self, event: AnyEvent) -> None: ...


class _NullSink:
    def emit(self, event: AnyEvent) -> None: ...


NULL_SINK = _NullSink()  # drops every event
