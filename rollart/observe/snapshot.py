"""What is known about a run at one moment. Frozen plain values: any thread may draw them, JSON can carry them."""

from dataclasses import dataclass, field

from rollart.core.types import LogprobGap

# claim: waiting for a free environment; queue: waiting in the engine; other: all that no stage accounts for
AGENT = ("requests", "completions", "segments", "forks", "retries", "undelivered", "mismatches")
STAGES = ("claim", "reset", "queue", "generate", "step", "score", "other")


@dataclass(frozen=True, slots=True)
class HeldOutPoint:
    """Success on held-out episodes at one version."""

    version: int
    t: float
    success: float
    reward: float
    episodes: int
    failed: int
    final: bool
    samples: int = 1
    passed: float | None = None


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One optimizer step. `rewards`: mean per task of the trajectories that ended since the step before it."""

    version: int
    t: float
    seconds: float
    waited_s: float
    tokens: int
    trajectories: int
    staleness: dict[int, int]
    metrics: dict[str, float]
    rewards: dict[str, float]
    values: dict[str, float]
    gaps: tuple[LogprobGap, ...] = ()

    @property
    def mean_staleness(self) -> float:
        return sum(age * n for age, n in self.staleness.items()) / max(1, sum(self.staleness.values()))


@dataclass(frozen=True, slots=True)
class EndedTrajectory:
    """A trajectory that ended, and the seconds it spent in each stage."""

    id: str
    task: str
    outcome: str
    turns: int
    tokens: int
    reward: float | None
    success: bool | None
    seconds: float
    stages: dict[str, float]


@dataclass(frozen=True, slots=True)
class TaskSnapshot:
    """`reward`, `success`, `turns`, `tokens` and `seconds` are means over the last trainable trajectories. `out` is why
    the task is in quarantine, if it is."""

    name: str
    held_out: tuple[HeldOutPoint, ...]
    reward: float | None
    success: float | None
    turns: float | None
    tokens: float | None
    seconds: float | None
    outcomes: dict[str, int]
    stages: dict[str, float]
    agent: dict[str, int] = field(default_factory=dict)
    out: str = ""

    @property
    def before(self) -> HeldOutPoint | None:
        """With the most episodes: the final one of RL has a counterpart at its start, that of imitation none."""
        whole = (point for point in self.held_out[:-1] if point.final)
        return next(whole, self.held_out[0] if self.held_out else None)

    @property
    def now(self) -> HeldOutPoint | None:
        return self.held_out[-1] if self.held_out else None


@dataclass(frozen=True, slots=True)
class PipelineCounts:
    running: int = 0
    scoring: int = 0
    ready: int = 0
    training: int = 0


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Share of the time that each part was busy, 0 to 1."""

    engine: float = 0.0
    trainer: float = 0.0
    environments: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """Where a worker runs: the device class in its request, the one it got, and its node."""

    role: str
    pool: str
    name: str
    wanted: str
    device: str
    node: str
    why: str


@dataclass(frozen=True, slots=True)
class RouteSummary:
    """Requests of one task that one pool answered: tokens in all, seconds per request, and why they went there."""

    task: str
    pool: str
    requests: int
    prefilled: int
    cached: int
    fetched: int
    decoded: int
    predicted_s: float
    actual_s: float
    why: dict[str, int]


@dataclass(frozen=True, slots=True)
class DurationQuantiles:
    """Percentiles, in seconds."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True)
class EnvironmentSummary:
    """What happened to the environments of one task. `killed` are processes that failed or hung in a call, `hedged` the
    second resets, and `won` those that were faster."""

    task: str
    resets: int
    reset_s: DurationQuantiles
    hedged: int
    won: int
    retried: int
    killed: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class RewardSummary:
    """What the calls of one reward function have cost, also those that failed. `billed_s` is what its platform charges
    for."""

    function: str
    invoker: str
    calls: int
    call_s: DurationQuantiles
    cold: int
    hedged: int
    retried: int
    failed: int
    billed_s: float


@dataclass(frozen=True, slots=True)
class MetricValue:
    """A metric of the table in `metric_table`: over about the last half minute, and over all of RL."""

    recent: float | None
    overall: float | None


@dataclass(frozen=True, slots=True)
class SwapSummary:
    """New weights of one engine, by one transport; bytes, seconds and tokens are those of the mean swap."""

    engine: str
    transport: str
    number: int
    bytes: float
    transfer_s: float
    exposed_s: float
    recomputed: float
    recompute_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`played`: held-out episodes since the last step; `recent_use` and the rates are over about half a minute."""

    name: str
    preset: str
    alpha: int
    seed: int
    phase: str
    played: int
    t: float
    step: int
    steps: int
    resumes: int
    eta_s: float | None
    warmup: tuple[int, int, float] | None
    tasks: tuple[TaskSnapshot, ...]
    pipeline: PipelineCounts
    recent_use: Utilisation
    use: Utilisation
    waited_s: float
    rl_s: float
    staleness: dict[int, int]
    drops: dict[str, int]
    trained: int
    metrics: dict[str, MetricValue]
    values: dict[str, float]
    history: tuple[StepPoint, ...] = field(repr=False)
    slowest: tuple[EndedTrajectory, ...]
    warnings: tuple[str, ...]
    routes: tuple[RouteSummary, ...] = ()
    places: tuple[WorkerPlacement, ...] = ()
    emulated: tuple[str, ...] = ()
    environments: tuple[EnvironmentSummary, ...] = ()
    rewards: tuple[RewardSummary, ...] = ()
    swaps: tuple[SwapSummary, ...] = ()
    work: str = "train"
    model: str = ""

    def task(self, name: str) -> TaskSnapshot:
        return next(task for task in self.tasks if task.name == name)


@dataclass(frozen=True, slots=True)
class RunWords:
    """What the parts of a run are called: `training` is what comes between the first evaluation and the last. `plays`:
    it plays the tasks of its run file, if only to evaluate. Without `trains` there is one result, not one before and
    one after. Without `resumes` an interrupted one starts from the beginning. Without `tokens` there are no engines."""

    training: str
    episodes: str = "held-out episodes"
    plays: bool = True
    command: str = ""  # that continues it, if it is not called as the work is
    trains: bool = True
    resumes: bool = True
    tokens: bool = True


WORDS = {
    "train": RunWords("RL"),
    "sft": RunWords("SFT"),
    "dpo": RunWords("DPO"),
    "reward-model": RunWords("training", "held-out pairs", plays=False),
    "eval": RunWords("evaluation", trains=False, resumes=False),
    "sample": RunWords("sampling", "sampled episodes", trains=False),
    "imitation": RunWords("imitation", "evaluation episodes", command="robots train"),
    "tuning": RunWords("RL", command="robots tune", tokens=False),
}


def words_of(work: str) -> RunWords:
    """Of an event log that a later rollart wrote too."""
    return WORDS.get(work, RunWords(work))


def failure_ratio(task: TaskSnapshot) -> float | None:
    """Failures after RL over failures before it: 0.5 means halved. None when there was nothing to improve."""
    before, after = task.before, task.now
    if before is None or after is None or before.success >= 1:
        return None
    return (1 - after.success) / (1 - before.success)
