"""`tasks`: what the policy learns, and how an episode is scored."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticKnownError

from rollart.config.algorithm import AlgorithmConfig, Band
from rollart.config.base import Conflict, ImportPath, Natural, Positive, Seconds, Section
from rollart.config.yaml_tree import did_you_mean
from rollart.core.errors import ConfigError
from rollart.core.schedule import GroupRule, SuccessBand, WeightPlan
from rollart.sandbox.bubblewrap import SandboxLimits
from rollart.sandbox.providers import is_remote

VARIABLE = r"^[A-Za-z_]\w*$"
VariableName = Annotated[str, Field(pattern=VARIABLE)]


class SamplingConfig(Section):
    """How the policy's tokens are sampled."""

    temperature: float = Field(1.0, gt=0, description="sampling temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling: probability mass to sample from; 1: all")
    top_k: Natural = Field(0, description="sample from this many most likely tokens; 0: all")
    max_tokens: Positive = Field(64, description="tokens generated per turn")


@dataclass(frozen=True, slots=True)
class Invoker:
    """How reward functions are called: by `build` of `rollart.rewards.transports.TRANSPORT`, or without a transport in
    local processes. `keys` are the keys of a reward that it takes, `extra` is the extra of rollart that it needs.
    `imported`: `rollart check` looks for the function on this machine, because it runs here or on nodes like it."""

    transport: str = ""
    keys: tuple[str, ...] = ()
    required: str = ""
    extra: str = ""
    title: str = ""
    imported: bool = False
    cluster: bool = False


INVOKERS = {
    "pool": Invoker(imported=True),
    "http": Invoker("http", ("url", "secret"), required="url"),
    "lambda": Invoker("aws", ("url", "name", "region"), required="name", extra="lambda", title="AWS Lambda"),
    "fc": Invoker("alibaba", ("url", "name", "region"), required="name", extra="fc", title="Function Compute"),
    "ray": Invoker("ray", ("device",), extra="ray", title="Ray Serve", imported=True, cluster=True),
}


def _known_invoker(name: str) -> str:
    if name not in INVOKERS:
        raise PydanticKnownError("literal_error", {"expected": ", ".join(f"'{known}'" for known in INVOKERS)})
    return name


# Rewards that rollart ships, by their short names.
REWARDS = {
    "env_return": "rollart.rewards.functions:env_return",
    "column_sum": "rollart.rewards.functions:column_sum",
    "exact": "rollart.rewards.answers:exact",
    "number": "rollart.rewards.answers:number",
    "math": "rollart.rewards.answers:math",
    "code": "rollart.rewards.code:passes_tests",
    "judge": "rollart.rewards.judge:judge",
    "pairwise": "rollart.rewards.group_judges:pairwise",
    "ranking": "rollart.rewards.group_judges:ranking",
    "reward_model": "rollart.rewards.reward_model:reward_model",
}

GROUP_REWARDS = ("pairwise", "ranking")


def _reward_path(value: Any) -> Any:
    return REWARDS.get(value, value) if isinstance(value, str) else value


class RewardConfig(Section):
    """A reward function and how it is called. `module:function` alone runs in local processes."""

    function: Annotated[ImportPath, BeforeValidator(_reward_path)] = Field(
        REWARDS["env_return"], description=f"module:function of an episode, or one of {', '.join(REWARDS)}"
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    pool: str | None = Field(
        None, description="pool of role judge whose `url` and `model` the function gets as keyword arguments"
    )
    group: bool | None = Field(
        None,
        description="the function gets all attempts at an episode at once, and compares them; default: as it is known "
        f"of {', '.join(GROUP_REWARDS)}",
    )
    version: str = Field("", description="refuse any other version of the function")
    invoker: Annotated[str, AfterValidator(_known_invoker)] = Field(
        "pool",
        description="local processes, a URL, AWS Lambda, Alibaba Function Compute, or Ray Serve",
        json_schema_extra={"enum": list(INVOKERS)},
    )
    url: str | None = Field(None, description="http: URL of the function; lambda, fc: another endpoint of the platform")
    name: str | None = Field(None, description="lambda, fc: name of the function")
    region: str | None = Field(None, description="lambda, fc: region; default: from the environment")
    device: str | None = Field(None, description="ray: device class of the replicas; default: CPUs")
    secret: str | None = Field(
        None, pattern=VARIABLE, description="http: environment variable with the secret that signs requests"
    )
    pass_env: list[VariableName] = Field(
        default=[], description="pool: environment variables that the function may read, by name; see Security"
    )
    concurrency: Positive = Field(64, description="concurrent calls; others wait in order")
    deadline: Seconds | None = Field(None, description="seconds for one call; default: rewards.deadline")
    retries: Natural | None = Field(None, description="more attempts after a failed call; default: rewards.retries")
    hedge: bool = Field(True, description="send a second request once a call takes longer than 95% of them")
    batch: Positive = Field(64, description="maximum episodes per call, if the function takes several")
    batch_window: Seconds = Field(0.01, description="seconds to wait for a batch to fill")

    @model_validator(mode="after")
    def _fits_its_invoker(self) -> "RewardConfig":
        invoker = INVOKERS[self.invoker]
        for key in dict.fromkeys(key for each in INVOKERS.values() for key in each.keys):
            if getattr(self, key) is not None and key not in invoker.keys:
                takers = " or ".join(name for name, each in INVOKERS.items() if key in each.keys)
                raise Conflict(f"`{key}` is for the invoker {takers}, not {self.invoker}", key)
        if invoker.transport and self.pass_env:
            raise Conflict(
                f"`pass_env` is for local processes; the invoker {self.invoker} calls remote ones", "pass_env"
            )
        for key in ("hedge", "batch", "batch_window"):
            if not invoker.transport and getattr(self, key) != type(self).model_fields[key].default:
                raise Conflict(f"`{key}` is for remote calls; the invoker {self.invoker} calls local processes", key)
        if invoker.required and getattr(self, invoker.required) is None:
            raise Conflict(f"the invoker {self.invoker} needs `{invoker.required}`", "invoker")
        if self.of_group and invoker.transport:
            raise Conflict(f"a reward of groups runs in local processes, not by the invoker {self.invoker}", "invoker")
        if self.pool is not None and invoker.transport:
            raise Conflict(f"`pool` is for local processes; the invoker {self.invoker} calls remote ones", "pool")
        if self.pool is not None and (given := {"url", "model"} & self.args.keys()):
            raise Conflict(f"the pool gives the function `{min(given)}`; leave it out of `args`", "args", min(given))
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise Conflict(f"url {self.url!r} must begin with http:// or https://", "url")
        return self

    @property
    def of_group(self) -> bool:
        """Whether it compares the attempts at an episode."""
        return self.function in map(REWARDS.get, GROUP_REWARDS) if self.group is None else self.group


def by_function(value: Any) -> Any:
    return {"function": value} if isinstance(value, str) else value


def _program(value: Any) -> Any:
    return {"command": value} if isinstance(value, list) else by_function(value)


class AgentConfig(Section):
    """A program that drives itself and calls the gateway for completions: a function or a command."""

    function: ImportPath | None = Field(None, description="module:function of an endpoint and an episode")
    command: list[str] | None = Field(
        None, min_length=1, description="instead of `function`, a program and its arguments, which runs in a sandbox"
    )
    files: Path | None = Field(None, description="command: a folder, copied into its working directory")
    mounts: list[Path] = Field(default=[], description="command: folders of this machine, mounted read-only")
    limits: dict[str, Positive] = Field(
        default_factory=dict, description="command: sandbox limits: " + ", ".join(SandboxLimits.__dataclass_fields__)
    )
    image: str | None = Field(
        None, min_length=1, description="command: an OCI image to run it in, with podman or docker; it must be there"
    )
    deadline: Seconds | None = Field(None, description="seconds for one episode; default: rollout.trajectory_deadline")
    max_calls: Positive = Field(200, description="completions per episode; more are refused")
    max_parallel: Positive = Field(16, description="concurrent requests of one episode; more get a 429")

    @model_validator(mode="after")
    def _function_or_command(self) -> "AgentConfig":
        if (self.function is None) == (self.command is None):
            raise Conflict("an agent needs either `function` or `command`", *(["command"] if self.command else []))
        for key in ("files", "mounts", "limits", "image"):
            if self.command is None and getattr(self, key):
                raise Conflict(f"`{key}` is for an agent with a `command`", key)
        if is_remote(self.image):
            raise Conflict(
                "a program in a sandbox of a service cannot reach the gateway; give it an image of podman or docker",
                "image",
            )
        for key in self.limits:
            if key not in SandboxLimits.__dataclass_fields__:
                near = did_you_mean(key, list(SandboxLimits.__dataclass_fields__))
                raise Conflict(f"the sandbox has no limit {key!r}{near}", "limits", key)
        return self


AgentInput = ImportPath | list[str] | AgentConfig | None
DATASET_ENV = "rollart.envs.dataset:DatasetTask"


class DatasetConfig(Section):
    """Rows of a file, each an episode of one turn. Every pass over the rows has an order of its own."""

    path: str = Field(min_length=1, description="a .jsonl, .json, .csv or .parquet file, or a hub id (owner/name)")
    split: str = Field("train", description="hub: the split to train on")
    subset: str | None = Field(None, description="hub: the subset, if the dataset has several")
    revision: str | None = Field(None, description="hub: branch, tag or commit")
    prompt: str = Field("{question}", description="text of the prompt; `{column}` is replaced by the row's value")
    system: str | None = Field(None, description="a system message, with columns like `prompt`")
    answer: str = Field("answer", description="column of the answer, for the reward; dots lead into nested values")
    held_out: float | str = Field(
        0.1, description="fraction of rows that are only evaluated, by content; or the file or split to evaluate on"
    )
    limit: Positive | None = Field(None, description="use only this many rows")

    @model_validator(mode="after")
    def _fraction(self) -> "DatasetConfig":
        if isinstance(self.held_out, float) and not 0 < self.held_out < 1:
            raise Conflict(f"held_out is {self.held_out:g}; a fraction is between 0 and 1", "held_out")
        return self


def dataset_source(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


_PAIR = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Points = list[Annotated[tuple[int, float], _PAIR]]


class WeightScheduleConfig(Section):
    """How the weight of a task changes with the steps of the run. `schedule: [[step, factor], ...]` is short for
    `{points: ...}`."""

    points: Points = Field(min_length=1, description="[step, factor of `weight`], in the order of steps")
    between: Literal["line", "step"] = Field(
        "line", description="factors between two points: on the line from one to the other, or that of the first"
    )

    @model_validator(mode="after")
    def _in_order(self) -> "WeightScheduleConfig":
        steps = [step for step, _ in self.points]
        if any(later <= earlier for earlier, later in pairwise(steps)) or steps[0] < 0:
            raise Conflict("the steps of `points` must rise, from 0 on", "points")
        if any(factor < 0 for _, factor in self.points):
            raise Conflict("a factor of a weight cannot be negative", "points")
        return self

    def plan(self) -> WeightPlan:
        return WeightPlan(tuple(self.points), linear=self.between == "line")


class CurriculumConfig(Section):
    """The weight of a task by its own success: one that is too hard yet, or solved, has less of every batch. Several
    tasks with one environment of rising difficulty are a curriculum."""

    band: Band = Field((0.05, 0.95), description="range of success in which the task has its whole weight")
    outside: float = Field(0.25, gt=0, le=1, description="factor of its weight outside of the band")
    window: int = Field(128, ge=1, le=1024, description="trajectories over which success is measured")

    @model_validator(mode="after")
    def _band_of_shares(self) -> "CurriculumConfig":
        _check_band(self.band, "band")
        return self

    def rule(self) -> SuccessBand:
        return SuccessBand(*self.band, outside=self.outside, window=self.window)


class FilterConfig(Section):
    """Which groups of a task are trained. A group that is dropped is replaced by a new one, so batches keep their
    mixture; drops are counted by reason. `filter: spread` is short for `{spread: true}`."""

    spread: bool = Field(False, description="drop groups whose rewards are all the same (DAPO)")
    success: Band = Field((0.0, 1.0), description="drop groups whose share of successes is outside of this range")
    tries: int = Field(8, ge=1, description="drops in a row after which a group is trained whatever it is")
    keep: float = Field(
        1.0, gt=0, le=1, description="of the groups that pass, train this share: those with most spread (StarPO-S)"
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"spread": True} if value == "spread" else value

    @model_validator(mode="after")
    def _range_of_shares(self) -> "FilterConfig":
        _check_band(self.success, "success")
        return self

    def rule(self) -> GroupRule:
        low, high = self.success
        return GroupRule(spread=self.spread, low=low, high=high, tries=self.tries, keep=self.keep)


def _check_band(band: tuple[float, float], key: str) -> None:
    if not 0 <= band[0] <= band[1] <= 1:
        raise Conflict(f"{key} must be a range of shares, [low, high] from 0 to 1, not [{band[0]:g}, {band[1]:g}]", key)


def _points(value: Any) -> Any:
    return {"points": value} if isinstance(value, list) else value


class TaskConfig(Section):
    """A named source of episodes."""

    name: str = Field(pattern=r"^[A-Za-z][\w-]*$", description="name of the task")
    env: str = Field("", pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?$", description="module:Class of an environment")
    agent: Annotated[AgentConfig | None, BeforeValidator(_program, json_schema_input_type=AgentInput)] = Field(
        None, description="instead of `env`, a program that drives itself: module:function, a command or a section"
    )
    dataset: Annotated[
        DatasetConfig | None, BeforeValidator(dataset_source, json_schema_input_type=str | DatasetConfig | None)
    ] = Field(None, description="instead of `env`, the rows of a file or of a dataset of the hub: a path or a section")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment or the agent")
    family: str | None = Field(
        None, pattern=r"^[A-Za-z][\w-]*$", description="the family whose Python runs it; see `rollart envs`"
    )
    pass_env: list[VariableName] = Field(
        default=[],
        description="environment variables that the environment or agent gets, by name: keys of other services. It has "
        "no others of the controller's, but for harmless ones such as PATH and HOME",
    )
    isolation: Literal["auto", "process", "shared"] = Field(
        "auto",
        description="process: one for each episode; shared: one for many light episodes; auto: as the class declares",
    )
    player: ImportPath | None = Field(None, description="module:function, the scripted player of the warmup")
    player_args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the player")
    reward: Annotated[RewardConfig, BeforeValidator(by_function, json_schema_input_type=ImportPath | RewardConfig)] = (
        Field(RewardConfig(), description="module:function of an episode, or a section that also says how to call it")
    )
    teacher: str | None = Field(
        None,
        description="pool of role teacher that it learns from; default: the only one, if no task names any",
    )
    opponent: str | None = Field(
        None,
        description="pool of role judge that plays against it: the environment gets its `url` and `model` in "
        "`opponent_args`",
    )
    weight: float = Field(1.0, ge=0, description="weight of the task in every batch; 0: it is only evaluated")
    schedule: Annotated[
        WeightScheduleConfig | None,
        BeforeValidator(_points, json_schema_input_type=WeightScheduleConfig | Points | None),
    ] = Field(None, description="how the weight changes with the steps: [[step, factor], ...] or a section")
    curriculum: CurriculumConfig | None = Field(None, description="how the weight changes with the task's success")
    group_size: int | None = Field(None, ge=2, description="trajectories in a group; default: training.group_size")
    algorithm: AlgorithmConfig | None = Field(
        None, description="keys of training.algorithm that are different for this task; the others are the run's"
    )
    filter: FilterConfig | None = Field(None, description="which groups are trained: `spread`, or a section")
    max_turns: Positive = Field(1, description="turns of a trajectory; more are truncated")
    max_context: Positive = Field(1024, description="tokens of a trajectory; longer ones are truncated")
    sampling: SamplingConfig = SamplingConfig()
    affinity: str | list[str] = Field(
        "auto", description="auto, prefill or decode; or the pools it is pinned to, in order of preference"
    )

    @model_validator(mode="before")
    @classmethod
    def _dataset_is_an_environment(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("dataset") is not None:
            if value.get("env") in (None, "", DATASET_ENV):
                return {"reward": "exact", **value, "env": DATASET_ENV}
            raise Conflict(f"task {value.get('name')!r} has both `env` and `dataset`; leave one out", "dataset")
        return value

    @model_validator(mode="after")
    def _env_or_agent(self) -> "TaskConfig":
        if bool(self.env) == (self.agent is not None):
            what = f"task {self.name!r} needs either `env`, `agent` or `dataset`"
            raise Conflict(what, *(["agent"] if self.env else []))
        if self.dataset is not None and self.max_turns > 1:
            raise Conflict(f"task {self.name!r} is a dataset: its episodes have one turn", "max_turns")
        if self.sampling.max_tokens >= self.max_context:
            most = self.sampling.max_tokens
            room = f"max_context {self.max_context} has no room for an observation and {most} tokens of an action"
            raise Conflict(f"task {self.name!r}: {room}; raise it, or lower sampling.max_tokens", "max_context")
        return self

    @property
    def env_args(self) -> dict[str, Any]:
        """Keyword arguments of the environment."""
        if self.opponent is not None and "url" not in self.args.get("opponent_args", {}):
            raise ConfigError(
                f"the opponent of task {self.name} is a pool, which a run starts; here, give its environment the `url` "
                "and the `model` of one in `opponent_args`"
            )
        return {"dataset": self.dataset.model_dump(), **self.args} if self.dataset else self.args
