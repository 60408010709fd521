"""The run file: what a user may ask for, with the defaults. Imports no torch, so that checking a file is instant."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rollart.resources.devices import CATALOGUE
from rollart.rollout.quarantine import DEFAULT, Rule
from rollart.rollout.schedule import Schedule, preset
from rollart.yamltree import did_you_mean

Preset = Literal["sync", "sync_plus", "one_off", "start_bound", "rollart"]
Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
POOL_NAME = r"^[A-Za-z][\w-]*$"
SCHEDULE_KEYS = ("alpha", "window", "extra_members", "extra_groups")
AFFINITIES = ("auto", "prefill", "decode")
DEFAULT_POOLS = {"train": "trainer", "generate": "engine", "environment": "environments"}
TorchDevice = Annotated[
    str,
    Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N; auto: by its pool's class"),
]
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class Conflict(ValueError):
    """Values that cannot go together; `path` leads from the section that noticed to the key to change."""

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TinyModel(Section):
    """A causal LM made from scratch, with a character tokenizer and a chat template."""

    architecture: Literal["qwen3", "llama", "qwen3_moe"] = "qwen3"
    hidden: Positive = 128
    layers: Positive = 4
    heads: Positive = 4
    kv_heads: Positive = 2
    context: Positive = 1024

    @model_validator(mode="after")
    def _grouped_heads(self) -> "TinyModel":
        if self.heads % self.kv_heads:
            raise Conflict(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})", "kv_heads")
        return self


class WarmUp(Section):
    """Supervised start on demonstrations from each task's scripted player."""

    demonstrations: Positive = Field(3000, description="conversations per task")
    steps: Positive = 600
    batch: Positive = Field(32, description="conversations per step")
    lr: float = Field(3e-3, gt=0)


class Model(Section):
    path: Path | None = Field(None, description="a Hugging Face folder to start from")
    tiny: TinyModel | None = Field(None, description="or make a tiny model from scratch")
    warm_up: WarmUp | None = Field(None, description="supervised start before RL")

    @model_validator(mode="after")
    def _one_source(self) -> "Model":
        if (self.path is None) == (self.tiny is None):
            raise ValueError("give either `path` (a Hugging Face folder) or `tiny` (made from scratch), not both")
        return self


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


class Rollout(Section):
    preset: Preset = "rollart"
    alpha: Natural = Field(1, description="no trained token is older than this many versions")
    window: float = Field(2.0, ge=1, description="batches of groups that compete for the next batch")
    extra_members: Natural = Field(0, description="surplus trajectories per group, cancelled once it is complete")
    extra_groups: Natural = Field(0, description="surplus groups per task in flight")
    retries: Natural = Field(3, description="replacements for failed members of a group, before it is dropped")
    trajectory_deadline: Seconds = 300.0

    @model_validator(mode="after")
    def _preset_has_the_keys(self) -> "Rollout":
        """A key that the preset takes no notice of would only seem to be set."""
        free = {"rollart": set(SCHEDULE_KEYS), "start_bound": {"alpha"}}.get(self.preset, set())
        for key in SCHEDULE_KEYS:
            if key not in free and getattr(self, key) != type(self).model_fields[key].default:
                raise Conflict(f"preset {self.preset!r} has its own {key}; leave it out or choose another preset", key)
        return self

    def schedule(self) -> Schedule:
        return preset(self.preset, self.alpha, self.window, self.extra_members, self.extra_groups)


class Engine(Section):
    count: Positive = 1
    max_batch: Positive = Field(64, description="sequences decoded together")
    prefill_chunk: Positive = Field(512, description="prompt tokens per step, beside the decoding ones")
    kv_megabytes: Positive = Field(512, description="for running and for kept sequences together")
    on_swap: Literal["recompute", "keep"] = Field("recompute", description="KV of running sequences at a weight swap")
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: TorchDevice = "auto"
    threads: Positive = 1
    deadline: Seconds = Field(120.0, description="seconds for one request")


class Device(Section):
    """A device class of the user's own, or other numbers for one of the catalogue."""

    tflops: float | None = Field(None, gt=0, description="dense bfloat16")
    bandwidth: float | None = Field(None, gt=0, description="memory, GB/s")
    memory: float | None = Field(None, gt=0, description="GB")
    link: float | None = Field(None, gt=0, description="to other devices of its node, GB/s; 10 if not in the catalogue")
    network: float | None = Field(None, gt=0, description="out of its node, GB/s; 1 if not in the catalogue")
    price: float | None = Field(None, gt=0, description="relative to one H20; 1 if not in the catalogue")


class Pool(Section):
    """Workers of one role on one device class."""

    role: Literal["train", "generate", "environment"]
    device: str | list[str] = Field("auto", description="a device class, several in order of preference, or auto")
    count: Positive = Field(1, description="train: ranks; generate: engines; environment: hosts of environments")
    urls: list[str] = Field(
        default_factory=list, description="generate, environment: engines or hosts that someone else runs"
    )
    emulate: float | None = Field(
        None, gt=1, description="generate, without such a device: pace a CPU engine to it, so many times slower"
    )

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device,) if isinstance(self.device, str) else tuple(self.device)

    @property
    def auto(self) -> bool:
        return self.devices == ("auto",)

    @property
    def workers(self) -> int:
        return len(self.urls) or self.count

    @model_validator(mode="after")
    def _fits_its_role(self) -> "Pool":
        if self.urls and self.role == "train":
            raise Conflict("`urls` is for pools of role generate or environment, not train", "urls")
        if self.emulate and self.role != "generate":
            raise Conflict(f"`emulate` is for pools of role generate, not {self.role}", "emulate")
        if self.urls and self.emulate:
            raise Conflict("engines that someone else runs cannot be emulated here", "emulate")
        if self.urls and self.count not in (1, len(self.urls)):
            raise Conflict(f"count is {self.count}, but there are {len(self.urls)} urls; leave count out", "count")
        if self.emulate and len(self.devices) != 1:
            raise Conflict("an emulated device is always there; name one class, without fallbacks", "device")
        if self.auto and (self.emulate or self.urls):
            what = "to emulate" if self.emulate else "of the engines that someone else runs"
            raise Conflict(f"name the device class {what}", "device")
        if not self.devices or len(set(self.devices)) < len(self.devices) or (not self.auto and "auto" in self.devices):
            raise Conflict("name a device class, different ones in order of preference, or auto alone", "device")
        return self


class Routing(Section):
    """Which engine serves a request."""

    policy: Literal["measured", "declared", "round_robin"] = Field(
        "measured", description="by the measured shape of the tasks, by `affinity` alone, or in turn"
    )
    hand_over: Literal["never", "auto", "always"] | list[str] = Field(
        "never", description="prefill on one engine, decode on another; or the names of a prefill and a decode pool"
    )


class Quarantine(Section):
    """When a task that keeps failing is left out of the mixture, and when it is tried again."""

    rate: float = Field(DEFAULT.rate, gt=0, le=1, description="share of its last trajectories that failed")
    window: Positive = Field(DEFAULT.window, description="how many of the last count")
    least: Positive = Field(DEFAULT.least, description="and how many there must be")
    groups: Positive = Field(DEFAULT.groups, description="or so many groups in a row that could not be completed")
    wait: Seconds = Field(DEFAULT.wait, description="seconds until it is tried again; doubled each time")

    def rule(self) -> Rule:
        return Rule(**self.model_dump())


class Environments(Section):
    slots: Positive = Field(64, description="environments alive at the same time, per task")
    reset_deadline: Seconds = 30.0
    step_deadline: Seconds = 10.0
    close_deadline: Seconds = 5.0
    retries: Natural = Field(2, description="fresh environments tried for one reset")
    hedges: Natural = Field(
        8, description="per task, beside the slots: second resets, begun once one takes longer than most do"
    )
    hedge_after: float = Field(0.95, gt=0, lt=1, description="quantile of a task's resets after which one is slow")
    warm: Natural = Field(2, description="per task, beside the slots: environments made ready before they are needed")
    quarantine: Quarantine = Quarantine()


class Rewards(Section):
    workers: Positive = Field(2, description="local processes, started when needed")
    deadline: Seconds = Field(30.0, description="seconds for one call")
    retries: Natural = 2


class Algorithm(Section):
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    solved: float = Field(
        0.15, ge=0, description="advantage of groups whose members all got the top reward: keeps them learnt"
    )
    evidence: float = Field(
        1.0, ge=0, description="power of the share of groups with spread that scales the learning rate; 0: off"
    )
    loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    importance_cap: float | None = Field(2.0, gt=0, description="truncated importance sampling; null: off")
    kl: float = Field(0.0, ge=0, description="weight of the KL to the reference, the policy at the start of RL")
    entropy: float = Field(0.0, ge=0)
    aggregate: Literal["token", "sequence", "group"] = "token"


class Training(Section):
    steps: Positive = 100
    batch_groups: Positive = Field(16, description="groups in a batch, split over the tasks by their weights")
    group_size: int = Field(8, ge=2)
    lr: float = Field(1e-3, gt=0)
    lr_warm_up: Natural = 5
    lr_end: float = Field(1.0, gt=0, le=1, description="share of lr at the last step, approached in a straight line")
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = Field(1.0, gt=0)
    epochs: Positive = Field(1, description="optimizer updates on one batch")
    pack_tokens: Positive = Field(8192, description="tokens in one forward pass")
    threads: Positive = 1
    device: TorchDevice = "auto"
    algorithm: Algorithm = Algorithm()
    deadline: Seconds = Field(600.0, description="seconds for one step")


class Evaluation(Section):
    every: Natural = Field(20, description="steps; 0: only before and after")
    episodes: Positive = Field(64, description="per task, on held-out seeds")
    final_episodes: Positive = Field(200, description="per task, before and after RL")


class Checkpoint(Section):
    every: Positive = 10
    keep: Positive = 2


class RunFile(Section):
    """Everything a run needs."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][\w.-]*$")
    seed: Natural = 0
    output: Path = Field(Path("runs"), description="run folders are made in here")
    model: Model
    tasks: Annotated[list[Task], Field(min_length=1)]
    rollout: Rollout = Rollout()
    cluster: str | None = Field(None, description="address of a Ray cluster; absent: this machine")
    weights: Path | None = Field(
        None, description="folder for weights, which all nodes of a cluster see; absent: shared memory"
    )
    devices: dict[str, Device] = Field(default_factory=dict, description="device classes of your own")
    pools: dict[Annotated[str, Field(pattern=POOL_NAME)], Pool] = Field(
        default_factory=dict, description="what runs on which device class"
    )
    routing: Routing = Routing()
    engine: Engine = Engine()
    environments: Environments = Environments()
    rewards: Rewards = Rewards()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()

    def pools_of(self, role: str) -> dict[str, Pool]:
        """The pools of a role; what the run file leaves out runs on CPUs."""
        named = {name: pool for name, pool in self.pools.items() if pool.role == role}
        if named:
            return named
        count = self.engine.count if role == "generate" else 1
        return {DEFAULT_POOLS[role]: Pool(role=role, device="cpu", count=count)}

    def all_pools(self) -> dict[str, Pool]:
        """Those of the run file, in its order, and the ones that it leaves out."""
        return self.pools | {name: pool for role in DEFAULT_POOLS for name, pool in self.pools_of(role).items()}

    @model_validator(mode="after")
    def _pools_fit(self) -> "RunFile":
        generate = {name for name, pool in self.pools.items() if pool.role == "generate"}
        if generate and self.engine.count != 1:
            raise Conflict("engine.count is for runs without pools of role generate", "engine", "count")
        self._check_pools()
        if len([pool for pool in self.pools.values() if pool.role == "train"]) > 1:
            last = [name for name, pool in self.pools.items() if pool.role == "train"][-1]
            raise Conflict("there can be only one pool of role train", "pools", last)
        known = set(self.pools_of("generate"))
        for index, task in enumerate(self.tasks):
            wanted = [task.affinity] if isinstance(task.affinity, str) else task.affinity
            for name in wanted:
                if name not in known and not (isinstance(task.affinity, str) and name in AFFINITIES):
                    raise Conflict(
                        f"affinity {name!r} of task {task.name!r} is neither one of {', '.join(AFFINITIES)} nor a pool "
                        f"of role generate ({', '.join(sorted(known))})",
                        *("tasks", index, "affinity"),
                    )
        if isinstance(self.routing.hand_over, list):
            unknown = [name for name in self.routing.hand_over if name not in known]
            if unknown or len(self.routing.hand_over) != 2:
                raise Conflict(
                    "hand_over names two pools of role generate: one that prefills and one that decodes",
                    *("routing", "hand_over"),
                )
        return self

    def _check_pools(self) -> None:
        for name, device in self.devices.items():
            lacks = [key for key in ("tflops", "bandwidth", "memory") if getattr(device, key) is None]
            if lacks and name not in CATALOGUE:
                raise Conflict(f"{name!r} is not in the catalogue, so it needs {' and '.join(lacks)}", "devices", name)
        for role, default in DEFAULT_POOLS.items():
            if default in self.pools and self.pools[default].role != role:
                raise Conflict(
                    f"the name {default!r} is kept for pools of role {role}; choose another", "pools", default
                )
        known = [*self.devices, *(name for name in CATALOGUE if name not in self.devices)]
        for name, pool in self.pools.items():
            for wanted in pool.devices:
                if wanted not in known and not pool.auto:
                    raise Conflict(
                        f"there is no device class {wanted!r}"
                        + (did_you_mean(wanted, known) or f"; define it in `devices`, or use {', '.join(known)}"),
                        *("pools", name, "device"),
                    )

    @model_validator(mode="after")
    def _consistent(self) -> "RunFile":
        names = [task.name for task in self.tasks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            second = len(names) - 1 - names[::-1].index(twice[0])
            raise Conflict(f"two tasks are named {twice[0]!r}; names must differ", "tasks", second, "name")
        if self.training.batch_groups < len(names):
            raise Conflict(
                f"training.batch_groups is {self.training.batch_groups}, too few for {len(names)} tasks: "
                "every task needs a group in every batch",
                "training",
                "batch_groups",
            )
        for index, task in enumerate(self.tasks):
            if task.reward.invoker == "ray" and self.cluster is None:
                raise Conflict("invoker ray needs `cluster`, the address of a Ray cluster", "tasks", index, "reward")
        if self.model.warm_up:
            for index, task in enumerate(self.tasks):
                if task.player is None:
                    raise Conflict(f"task {task.name!r} has no `player`, which model.warm_up needs", "tasks", index)
        if self.model.tiny:
            for index, task in enumerate(self.tasks):
                if task.max_context > self.model.tiny.context:
                    raise Conflict(
                        f"tasks.{task.name}.max_context is {task.max_context}, "
                        f"more than the model's context of {self.model.tiny.context}",
                        "tasks",
                        index,
                        "max_context",
                    )
        return self
