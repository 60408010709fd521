"""`tasks`: what the policy learns, and how an episode is scored."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rollart.config.base import Conflict, ImportPath, Natural, Positive, Seconds, Section


class SamplingConfig(Section):
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Natural = Field(0, description="0: no limit")
    max_tokens: Positive = Field(64, description="per turn")


class Reward(Section):
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
    def _fits_its_invoker(self) -> "Reward":
        takes = {"url": ("http", "lambda", "fc"), "secret": ("http",), "device": ("ray",)}
        takes |= {"name": ("lambda", "fc"), "region": ("lambda", "fc")}
        for key, invokers in takes.items():
            if getattr(self, key) is not None and self.invoker not in invokers:
                raise Conflict(f"`{key}` is for the invoker {' or '.join(invokers)}, not {self.invoker}", key)
        needed = {"http": "url", "lambda": "name", "fc": "name"}.get(self.invoker)
        if needed and getattr(self, needed) is None:
            raise Conflict(f"the invoker {self.invoker} needs `{needed}`", "invoker")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise Conflict(f"url {self.url!r} must begin with http:// or https://", "url")
        return self


def _by_name(value: Any) -> Any:
    return {"function": value} if isinstance(value, str) else value


class Task(Section):
    """A named source of episodes."""

    name: str = Field(pattern=r"^[A-Za-z][\w-]*$")
    env: ImportPath = Field(description="module:Class of an environment")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    family: str | None = Field(
        None, pattern=r"^[A-Za-z][\w-]*$", description="run it with the Python of this family; see `rollart envs`"
    )
    player: ImportPath | None = Field(None, description="module:function, the scripted player of the warm-up")
    player_args: dict[str, Any] = Field(default_factory=dict)
    reward: Annotated[Reward, BeforeValidator(_by_name, json_schema_input_type=ImportPath | Reward)] = Field(
        Reward(), description="module:function of an episode, or a section that also says how to call it"
    )
    weight: float = Field(1.0, gt=0, description="share of this task in every trained batch")
    max_turns: Positive = 1
    max_context: Positive = Field(1024, description="tokens; longer trajectories end as truncated")
    sampling: SamplingConfig = SamplingConfig()
    affinity: str | list[str] = Field(
        "auto", description="auto, prefill or decode; or a pool's name, or pools in order of preference: a pin"
    )
