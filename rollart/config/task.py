"""`tasks`: what the policy learns, and how an episode is scored."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rollart.config.base import Conflict, ImportPath, Natural, Positive, Seconds, Section
from rollart.config.yaml_tree import did_you_mean
from rollart.sandbox.bubble import Limits


class SamplingConfig(Section):
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Natural = Field(0, description="0: no limit")
    max_tokens: Positive = Field(64, description="per turn")


class RewardConfig(Section):
    """A reward function and the way to it. `module:function` alone is one that runs in the local pool."""

    function: ImportPath = Field("rollart.rewards.functions:env_return", description="module:function of an episode")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    version: str = Field("", description="refuse to score with any other version of the function")
    invoker: Literal["pool", "http", "lambda", "fc", "ray"] = Field(
        "pool", description="local processes, a URL, AWS Lambda, Alibaba Function Compute, or Ray Serve"
    )
    url: str | None = Field(None, description="http: where it is served; lambda, fc: another endpoint of the platform")
    name: str | None = Field(None, description="lambda, fc: the name of the function there")
    region: str | None = Field(None, description="lambda, fc: the region; absent: from the environment")
    device: str | None = Field(None, description="ray: the device class that replicas need; absent: a CPU")
    secret: str | None = Field(
        None, pattern=r"^[A-Za-z_]\w*$", description="http: environment variable with the secret that signs requests"
    )
    concurrency: Positive = Field(64, description="calls at the same time; the others wait in order")
    deadline: Seconds | None = Field(None, description="seconds for one call; absent: rewards.deadline")
    retries: Natural | None = Field(None, description="absent: rewards.retries")
    hedge: bool = Field(True, description="ask a second time once a call takes longer than 95% of them do")
    batch: Positive = Field(64, description="most episodes in one call, if the function takes several")
    batch_window: Seconds = Field(0.01, description="seconds to wait for a batch to fill")

    @model_validator(mode="after")
    def _fits_its_invoker(self) -> "RewardConfig":
        takes = {"url": ("http", "lambda", "fc"), "secret": ("http",), "device": ("ray",)}
        takes |= {"name": ("lambda", "fc"), "region": ("lambda", "fc")}
        for key, invokers in takes.items():
            if getattr(self, key) is not None and self.invoker not in invokers:
                raise Conflict(f"`{key}` is for the invoker {' or '.join(invokers)}, not {self.invoker}", key)
        for key in ("hedge", "batch", "batch_window"):
            if self.invoker == "pool" and getattr(self, key) != type(self).model_fields[key].default:
                raise Conflict(f"`{key}` is for calls to elsewhere; the invoker pool calls local processes", key)
        needed = {"http": "url", "lambda": "name", "fc": "name"}.get(self.invoker)
        if needed and getattr(self, needed) is None:
            raise Conflict(f"the invoker {self.invoker} needs `{needed}`", "invoker")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise Conflict(f"url {self.url!r} must begin with http:// or https://", "url")
        return self


def _by_name(value: Any) -> Any:
    return {"function": value} if isinstance(value, str) else value


def _program(value: Any) -> Any:
    return {"command": value} if isinstance(value, list) else _by_name(value)


class AgentConfig(Section):
    """A program that drives itself: it asks the gateway for generations. `module:function` alone is one, and so is a
    command and its arguments, as a list."""

    function: ImportPath | None = Field(None, description="module:function of an endpoint and an episode")
    command: list[str] | None = Field(
        None, min_length=1, description="instead of `function`, a program and its arguments, which runs in a sandbox"
    )
    files: Path | None = Field(None, description="command: a folder, copied into the folder that it starts in")
    see: list[Path] = Field(default=[], description="command: folders of this machine that it sees, read-only")
    limits: dict[str, Positive] = Field(
        default_factory=dict, description="command: of the sandbox: " + ", ".join(Limits.__dataclass_fields__)
    )
    deadline: Seconds | None = Field(None, description="seconds for an episode; absent: rollout.trajectory_deadline")
    calls: Positive = Field(200, description="completions that one episode may have")
    parallel: Positive = Field(16, description="requests of one episode at the same time; more are told to wait")

    @model_validator(mode="after")
    def _function_or_command(self) -> "AgentConfig":
        if (self.function is None) == (self.command is None):
            raise Conflict("an agent needs either `function` or `command`", *(["command"] if self.command else []))
        for key in ("files", "see", "limits"):
            if self.command is None and getattr(self, key):
                raise Conflict(f"`{key}` is for an agent with a `command`", key)
        for key in self.limits:
            if key not in Limits.__dataclass_fields__:
                near = did_you_mean(key, list(Limits.__dataclass_fields__))
                raise Conflict(f"the sandbox has no limit {key!r}{near}", "limits", key)
        return self


AgentInput = ImportPath | list[str] | AgentConfig | None


class TaskConfig(Section):
    """A named source of episodes."""

    name: str = Field(pattern=r"^[A-Za-z][\w-]*$")
    env: str = Field("", pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?$", description="module:Class of an environment")
    agent: Annotated[AgentConfig | None, BeforeValidator(_program, json_schema_input_type=AgentInput)] = Field(
        None, description="instead of `env`, a program that drives itself: module:function, a command, or a section"
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment or the agent")
    family: str | None = Field(
        None, pattern=r"^[A-Za-z][\w-]*$", description="run it with the Python of this family; see `rollart envs`"
    )
    player: ImportPath | None = Field(None, description="module:function, the scripted player of the warmup")
    player_args: dict[str, Any] = Field(default_factory=dict)
    reward: Annotated[RewardConfig, BeforeValidator(_by_name, json_schema_input_type=ImportPath | RewardConfig)] = (
        Field(RewardConfig(), description="module:function of an episode, or a section that also says how to call it")
    )
    weight: float = Field(1.0, gt=0, description="share of this task in every trained batch")
    max_turns: Positive = 1
    max_context: Positive = Field(1024, description="tokens; longer trajectories end as truncated")
    sampling: SamplingConfig = SamplingConfig()
    affinity: str | list[str] = Field(
        "auto", description="auto, prefill or decode; or a pool's name, or pools in order of preference: a pin"
    )

    @model_validator(mode="after")
    def _env_or_agent(self) -> "TaskConfig":
        if bool(self.env) == (self.agent is not None):
            raise Conflict(f"task {self.name!r} needs either `env` or `agent`", *(["agent"] if self.env else []))
        return self
