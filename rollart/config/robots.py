"""Run files of `rollart robots`: a task, demonstrations, a policy that imitates them, and how it is evaluated."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rollart.config.base import Conflict, Natural, Positive, Seconds, Section
from rollart.config.rollout import EnvironmentsConfig

Predict = Literal["chunk", "velocity"]
PREDICT = "what the network outputs: the clean chunk, or the velocity"
POWER = "power of the adaptive weight: a squared error d counts as d / (d + 0.001)^power, 0: as d"


class MeanFlowConfig(Section):
    """One pass: learns the mean velocity over an interval of the flow."""

    name: Literal["meanflow"] = Field("meanflow", description="the method")
    steps: Positive = Field(1, description="network passes for one chunk")
    predict: Predict = Field("chunk", description=PREDICT)
    derivative: Literal["dde", "jvp"] = Field(
        "dde", description="the time derivative in the target: by central differences, or by forward-mode autodiff"
    )
    epsilon: float = Field(1e-3, gt=0, lt=0.5, description="half the time step of the central difference")
    flow_share: float = Field(0.5, ge=0, le=1, description="share of a batch with intervals of length 0")
    adaptive_power: float = Field(0.5, ge=0, le=1, description=POWER)
    guidance: float = Field(1.0, ge=1, description="how far targets are pushed beyond the prediction; 1: not")
    cosine: float = Field(0.0, ge=0, description="weight of the loss on the direction of the velocity")
    dispersive: float = Field(0.0, ge=0, description="weight of the loss that spreads hidden states")
    temperature: float | Literal["adaptive"] = Field(
        1.0, description="of the dispersive loss; adaptive: the median of the squared distances"
    )

    @model_validator(mode="after")
    def _temperature_is_positive(self) -> "MeanFlowConfig":
        if isinstance(self.temperature, float) and self.temperature <= 0:
            raise Conflict("temperature must be greater than 0, or `adaptive`", "temperature")
        return self


class ConsistencyConfig(Section):
    """One pass: consistency flow matching, as in FlowPolicy."""

    name: Literal["consistency"] = Field("consistency", description="the method")
    steps: Positive = Field(1, description="network passes for one chunk")
    predict: Predict = Field("velocity", description=PREDICT)
    delta: float = Field(0.01, gt=0, lt=1, description="time between the two points that must agree")
    segments: Positive = Field(2, description="pieces of the flow in which it is made straight")
    velocity_weight: float = Field(1e-5, ge=0, description="weight of the agreement of the velocities")


class FlowConfig(Section):
    """Flow matching: follows the velocity in small steps."""

    name: Literal["flow"] = Field("flow", description="the method")
    steps: Positive = Field(10, description="network passes for one chunk")
    predict: Predict = Field("chunk", description=PREDICT)
    adaptive_power: float = Field(0.5, ge=0, le=1, description=POWER)


class DiffusionConfig(Section):
    """Denoising diffusion, sampled deterministically (DDIM); the network predicts the clean chunk."""

    name: Literal["ddim"] = Field("ddim", description="the method")
    steps: Positive = Field(10, description="network passes for one chunk")
    noise_levels: Annotated[int, Field(ge=2)] = Field(100, description="steps of the noise schedule")

    @model_validator(mode="after")
    def _levels_suffice(self) -> "DiffusionConfig":
        if self.steps > self.noise_levels:
            raise Conflict(f"steps must be at most noise_levels, which is {self.noise_levels}", "steps")
        return self


class RegressionConfig(Section):
    """One pass: the mean of the demonstrated chunks."""

    name: Literal["regression"] = Field("regression", description="the method")


AnyPolicyConfig = MeanFlowConfig | ConsistencyConfig | FlowConfig | DiffusionConfig | RegressionConfig


def _named(value: Any) -> Any:
    """`policy: flow` is short for `policy: {name: flow}`."""
    return {"name": value} if isinstance(value, str) else value


PolicyChoice = Annotated[
    Annotated[AnyPolicyConfig, Field(discriminator="name")],
    BeforeValidator(_named, json_schema_input_type=str | AnyPolicyConfig),
]


class ControlConfig(Section):
    """What the policy observes, and how far it plans."""

    observation: Literal["state", "points"] = Field(
        "state",
        description="what the policy sees: the state, or a point cloud with hand and goal",
    )
    points: Positive = Field(128, description="points of a cloud")
    history: Positive = Field(2, description="observations that the policy sees: the last ones")
    chunk: Positive = Field(16, description="actions that are predicted at once")
    execute: Positive = Field(8, description="actions of a chunk that are executed before the next is predicted")

    @model_validator(mode="after")
    def _can_execute(self) -> "ControlConfig":
        if self.execute > self.chunk:
            raise Conflict(f"execute must be at most chunk, which is {self.chunk}", "execute")
        return self

    @property
    def cloud(self) -> int:
        """Points that are observed, 0: the state is."""
        return self.points if self.observation == "points" else 0


class NetworkConfig(Section):
    """A residual MLP, modulated by observation and time (FiLM)."""

    width: Positive = Field(128, description="width of a layer")
    layers: Positive = Field(3, description="residual blocks")


class DemonstrationsConfig(Section):
    """What is imitated: episodes of the task's scripted expert, or files."""

    episodes: Positive = Field(10, description="successful episodes to record, or to use of the files")
    path: Path | None = Field(None, description="an npz or HDF5 file, or a folder of npz files; default: recorded")
    deadline: Seconds = Field(600.0, description="seconds for recording all episodes")


class ImitationConfig(Section):
    """Supervised training of the policy."""

    steps: Positive = Field(3000, description="optimizer steps")
    batch: Positive = Field(128, description="chunks in a batch")
    lr: float = Field(1e-3, gt=0, description="learning rate, after its warmup; it decays to 0 as a cosine")
    lr_warmup: Natural = Field(200, description="steps in which the learning rate rises")
    weight_decay: float = Field(1e-6, ge=0, description="of AdamW")
    clip: float = Field(1.0, gt=0, description="most that the norm of a gradient may be")
    ema: float = Field(0.999, ge=0, lt=1, description="decay of the moving average of the weights, which is what acts")
    threads: Positive = Field(1, description="threads of the trainer")
    checkpoint_every: Positive = Field(1000, description="steps between checkpoints")
    deadline: Seconds = Field(600.0, description="seconds for one call of the trainer")


class TuningConfig(Section):
    """RL from the imitated policy, by `rollart robots tune`: episodes are played while the policy learns."""

    steps: Positive = Field(20, description="updates; the policy after n of them is version n")
    groups: Positive = Field(8, description="groups of an update")
    group_size: Annotated[int, Field(ge=2)] = Field(4, description="episodes of a group, which start alike")
    alpha: Natural = Field(
        1, description="versions that a chunk may be old when it is trained; older groups are dropped"
    )
    candidates: Annotated[int, Field(ge=2)] = Field(
        8, description="latents from which a chunk is made; the policy learns which of the chunks to execute"
    )
    explore: float = Field(
        0.0,
        ge=0,
        description="noise on what the policy observes, drawn once for each episode of a group but the first, in half "
        "ranges of the demonstrations; so some episodes hit what the policy misses",
    )
    advantage: str = Field("grpo", description="from the successes of a group to advantages, as for language")
    loss: str = Field("ppo", description="of the choices' log-probabilities, as for language")
    clip: float = Field(0.2, gt=0, lt=1, description="the policy ratio is clipped to 1 - clip and 1 + clip")
    scorer_lr: float = Field(1e-3, gt=0, description="learning rate of the scorer of candidates")
    scorer_decay: float = Field(1e-3, ge=0, description="its weight decay")
    imitate: bool = Field(
        True, description="go on imitating demonstrations, and with them the best success of each group"
    )
    keep: Positive = Field(50_000, description="steps of own successes that are kept to imitate, the newest")
    optimizer_steps: Positive = Field(50, description="steps of the optimizers in one update")
    lr: float = Field(
        3e-4, gt=0, description="learning rate of the imitation; in each update it decays to 0 as a cosine"
    )
    ema: float = Field(0.99, ge=0, lt=1, description="decay of the moving average of the weights, which is what acts")
    checkpoint_every: Positive = Field(5, description="updates between checkpoints")
    evaluate_every: Natural = Field(0, description="updates between evaluations while tuning; 0: none")


class RobotEvaluationConfig(Section):
    """Held-out episodes."""

    episodes: Positive = Field(50, description="episodes after training")
    every: Natural = Field(0, description="steps between evaluations while training; 0: none")
    quick: Positive = Field(20, description="episodes of those evaluations")


def two_processes() -> EnvironmentsConfig:
    """Simulators are heavy: as many processes as a small machine has cores, and none in reserve."""
    return EnvironmentsConfig(processes=2, warm=0, hedges=0, reset_deadline=60.0, step_deadline=30.0)


class _RobotFile(Section):
    name: str = Field("robots", pattern=r"^[A-Za-z0-9][\w.-]*$", description="name of the run, and of its folder")
    seed: Natural = Field(0, description="seed of demonstrations, weights, batches and held-out episodes")
    output: Path = Field(Path("runs"), description="folder of the run folders")
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    control: ControlConfig = ControlConfig()
    network: NetworkConfig = NetworkConfig()
    training: ImitationConfig = ImitationConfig()
    evaluation: RobotEvaluationConfig = RobotEvaluationConfig()
    environments: EnvironmentsConfig = Field(default_factory=two_processes)


class RobotRunFile(_RobotFile):
    """What `rollart robots train` reads: one task and one policy."""

    task: str = Field(description="family and name: `metaworld:pick-place-v3`, `adroit:door`")
    policy: PolicyChoice = Field(MeanFlowConfig(), description="the method, by name or as a section")
    urls: list[str] = Field(default_factory=list, description="environment hosts that run elsewhere")
    tuning: TuningConfig = TuningConfig()


class ComparisonFile(_RobotFile):
    """What `rollart robots compare` reads: every policy on every task with every seed."""

    tasks: Annotated[list[str], Field(min_length=1, description="tasks, as in the run file of one")]
    policies: Annotated[dict[str, PolicyChoice], Field(min_length=1, description="policies, by the name in the table")]
    seeds: Positive = Field(5, description="seeds of each policy on each task: seed, seed + 1, ...")
    jobs: Positive = Field(2, description="trainers at the same time, each with the environments of one process")
    stack: Positive = Field(15, description="policies that one trainer trains at once")
