"""The scenario: a run file with a `simulate` section that describes the workload.

All other keys mean the same as in a run file: pools and devices, preset, alpha, redundancy, batch, routing. A run file
that trains can be simulated as it is, once it has a `simulate` section.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import yaml
from pydantic import Field, model_validator

from rollart.config import EngineConfig, PoolConfig, RunFile, Section, TaskConfig, loading
from rollart.config.base import Conflict, ImportPath, Natural, Positive, Seconds
from rollart.config.rollout import SCHEDULE_KEYS, Preset, RolloutConfig
from rollart.config.yaml_tree import did_you_mean
from rollart.core.errors import ConfigError
from rollart.core.schedule import Schedule
from rollart.core.seeds import seed_of
from rollart.engines.backends import unsupported
from rollart.hardware.roofline import ModelShape
from rollart.placement.workload import model_shape, shape_of
from rollart.simulator.constants import ASSUMED_TOKENS, LINKS, Constants
from rollart.simulator.distributions import Quantity

Share = Field(0.0, ge=0, lt=1)
_ONE_IN = ("simulate", "one_in")
_CPU_ENGINE = {"max_batch": 64, "prefill_chunk": 512, "kv_megabytes": 512}  # as the run file's own defaults
_GPU_ENGINE = {"max_batch": 256, "prefill_chunk": 2048}


def engine_defaults(device: str) -> dict[str, int]:
    """Limits of an engine on this class of device, where the scenario has none."""
    return _CPU_ENGINE if device == "cpu" else _GPU_ENGINE


class ScenarioTask(TaskConfig):
    env: ImportPath = Field("rollart.simulator.environments:SimulatedEnvironment", description="ignored")


class ScenarioEngine(EngineConfig):
    """0 is the default of an engine for this kind of device."""

    max_batch: int = Field(0, ge=0)
    prefill_chunk: int = Field(0, ge=0)
    kv_megabytes: int = Field(0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class Workload(Section):
    """One task. Turns and tokens are rounded; seconds are those of the environment and the reward alone."""

    turns: Quantity = Field(1.0, description="at most the task's max_turns")
    prompt: Quantity = Field(256.0, description="tokens of the first observation, the same for a group")
    observation: Quantity = Field(128.0, description="tokens of every later observation")
    response: Quantity = Field(256.0, description="tokens of every response, at most sampling.max_tokens")
    window: float | None = Field(
        None,
        gt=0,
        description="tokens that a request has besides its prompt, the last ones; past turns before them are left out, "
        "and of a request only the prompt is cached. Default: the whole conversation",
    )
    reset: Quantity = Field(0.0, description="seconds")
    step: Quantity = Field(0.0, description="seconds")
    delay: Quantity = Field(0.0, description="extra seconds per step, for instance {normal: {mean: 5, sd: 2}}")
    reset_failures: float = Share
    step_failures: float = Share
    reward: Quantity = Field(0.0, description="seconds")
    reward_failures: float = Share

    def longer(self, factor: float) -> "Workload":
        """With this many times the tokens, where they are numbers."""
        tokens = {key: getattr(self, key) for key in ("prompt", "observation", "response")}
        return self.model_copy(
            update={key: value * factor for key, value in tokens.items() if isinstance(value, float)}
        )


class ScoringConfig(Section):
    """Where rewards are computed: on elastic functions, or on dedicated workers."""

    where: Literal["serverless", "dedicated"] = "serverless"
    concurrency: Positive = Field(1000, description="concurrent calls, over all functions or devices")
    cold_start: Quantity = Field(0.0, description="serverless: seconds of a call that finds no warm instance")
    keep_warm: Seconds = Field(60.0, description="serverless: seconds that an idle instance stays warm")
    device: str | None = Field(None, description="dedicated: device class, for price and use")
    devices: Natural = Field(0, description="dedicated: number of devices")


class TransferConfig(Section):
    """How weights reach the engines; `push` and `pull` name links."""

    method: Literal["store", "collective"] = "store"
    push: str = "ethernet"
    pull: str = "infiniband"
    overlap: bool = Field(True, description="store: false stops training and generation during the transfer")
    install_first: bool = Field(
        True, description="with `bound: served`, training waits until engines have the weights of the step before"
    )


class EnginePace(Section):
    """Measured seconds, in place of the roofline."""

    fixed: float = Field(ge=0, description="per forward pass")
    token: float = Field(ge=0, description="per token in it")
    context: float = Field(0.0, ge=0, description="per token of KV that it reads")


class TrainPace(Section):
    """Measured seconds, in place of FLOPs."""

    fixed: float = Field(ge=0, description="per step")
    token: float = Field(0.0, ge=0, description="per token in its batch")


class SimulateConfig(Section):
    workloads: dict[str, Workload] = Field(default_factory=dict, description="by task")
    device: str | None = Field(
        None, description="class of the GPU of a run without pools, whose trainer and engine have `device: cuda`"
    )
    warmup: Natural | None = Field(None, description="first steps, which are not measured; default: alpha + 1")
    bound: Literal["trained", "served"] = Field(
        "trained",
        description="what alpha of preset rollart counts from. trained: the version that a batch updates, as in real "
        "runs. served: the one that engines have when the batch is taken, which training is one ahead of: the paper's",
    )
    finite: bool = Field(False, description="start no rollouts for steps after the last, as a run that ends does")
    scoring: ScoringConfig = ScoringConfig()
    weights: TransferConfig = TransferConfig()
    links: dict[str, float] = Field(default_factory=dict, description=f"GB/s by name, added to {LINKS}")
    engines: dict[str, EnginePace] = Field(default_factory=dict, description="by pool: measured speed")
    train: TrainPace | None = None
    contention: float = Field(
        0.0, ge=0, description="engines and training share cores: while two work, each takes longer by this share"
    )
    cores: Natural = Field(0, description="cores that engines and training share, if more of them may work than that")
    constants: Constants = Constants()
    colocated: bool = Field(False, description="training and generation take turns on the same devices")
    log: Literal["full", "off"] = Field("full", description="write the event log of a real run, or none")
    sample_s: Seconds = Field(5.0, description="between samples of what is going on")
    one_in: Positive = Field(
        1,
        description="simulate one in this many engines, groups of a batch, environments and reward workers, for all",
    )


class Scenario(RunFile):
    tasks: list[ScenarioTask] = Field(min_length=1)  # type: ignore[assignment]
    engine: ScenarioEngine = ScenarioEngine()
    simulate: SimulateConfig = SimulateConfig()

    @model_validator(mode="after")
    def _fits(self) -> "Scenario":
        names = [task.name for task in self.tasks]
        for name in self.simulate.workloads:
            if name not in names:
                raise Conflict(f"there is no task {name!r}{did_you_mean(name, names)}", "simulate", "workloads", name)
        for key in ("push", "pull"):
            if (link := getattr(self.simulate.weights, key)) not in self.links:
                known = did_you_mean(link, list(self.links))
                raise Conflict(f"there is no link {link!r}{known}; name it in links", "simulate", "weights", key)
        if self.warmup >= self.training.steps:
            raise Conflict(
                f"{self.training.steps} steps of training leave none to measure after a warmup of {self.warmup}; take "
                "more steps, or set simulate.warmup",
                "training",
                "steps",
            )
        if (device := self.simulate.device) is not None and device not in self.device_classes():
            near = did_you_mean(device, list(self.device_classes()))
            raise Conflict(f"there is no device class {device!r}{near}", "simulate", "device")
        for what, count in self._alike().items():
            if count % self.simulate.one_in:
                raise Conflict(f"one in {self.simulate.one_in} needs a multiple of it, not {count} {what}", *_ONE_IN)
        return self

    @property
    def warmup(self) -> int:
        """Steps that are not measured: steps are too short until as many batches are in flight as alpha allows."""
        configured = self.simulate.warmup
        return 1 + self.schedule.alpha if configured is None else configured

    @property
    def schedule(self) -> Schedule:
        """With `simulate.bound: served`, alpha counts from a version that is one older than the one that is trained."""
        schedule = self.rollout.schedule()
        later = self.simulate.bound == "served" and self.rollout.preset == "rollart"
        return replace(schedule, alpha=schedule.alpha + 1) if later else schedule

    @property
    def links(self) -> dict[str, float]:
        return LINKS | self.simulate.links

    def pools_of(self, role: str) -> dict[str, PoolConfig]:
        """The default ones are on `simulate.device`, if it is given."""
        found, device = super().pools_of(role), self.simulate.device
        if (
            device is None
            or role not in ("train", "generate")
            or any(each.role == role for each in self.pools.values())
        ):
            return found
        return {name: pool.model_copy(update={"device": device}) for name, pool in found.items()}

    def with_preset(self, preset: str) -> "Scenario":
        """The same under another preset, without the keys that it does not allow. Raises ConfigError."""
        if preset not in get_args(Preset):
            raise ConfigError(f"there is no preset {preset!r}; there are {', '.join(get_args(Preset))}")
        free = {"rollart": SCHEDULE_KEYS, "start_bound": ("alpha",)}.get(preset, ())
        left = {
            key: value for key, value in self.rollout.model_dump().items() if key not in SCHEDULE_KEYS or key in free
        }
        return self.model_copy(update={"rollout": RolloutConfig(**left | {"preset": preset})})

    def with_other_constants(self, seed: int) -> "Scenario":
        """The same with constants as they could be too, and with more or fewer tokens where these are made up."""
        rng = random.Random(seed_of("tokens", seed))
        made_up = {
            task.name: self.workload(task.name).longer(math.exp(rng.gauss(0.0, ASSUMED_TOKENS)))
            for task in self.tasks
            if task.name not in self.simulate.workloads
        }
        changes = {
            "constants": self.simulate.constants.drawn(seed),
            "workloads": self.simulate.workloads | made_up,
        }
        return self.model_copy(update={"simulate": self.simulate.model_copy(update=changes)})

    def _alike(self) -> dict[str, int]:
        """What may be simulated in part: how many there are of each."""
        engines = {f"engines in pool {name!r}": pool.workers for name, pool in self.pools_of("generate").items()}
        return engines | {"groups in training.batch_groups": self.training.batch_groups}

    def divisible(self) -> "Scenario":
        """With the largest divisor of its `one_in` that divides it."""
        part = math.gcd(self.simulate.one_in, *self._alike().values())
        return self.model_copy(update={"simulate": self.simulate.model_copy(update={"one_in": part})})

    def thinned(self) -> "Scenario":
        """The part of it that is simulated, one in `simulate.one_in`. The trainer and the weights stay whole."""
        if (part := self.simulate.one_in) == 1:
            return self
        pools = {
            name: pool.model_copy(update={"count": pool.count // part}) if pool.role == "generate" else pool
            for name, pool in self.pools.items()
        }
        scoring = self.simulate.scoring
        fewer = scoring.model_copy(update={"concurrency": math.ceil(scoring.concurrency / part)})
        extra = math.ceil(self.schedule.extra_groups / part)
        processes, groups = math.ceil(self.environments.processes / part), self.training.batch_groups // part
        return self.model_copy(
            update={
                "pools": pools,
                "training": self.training.model_copy(update={"batch_groups": groups}),
                "environments": self.environments.model_copy(update={"processes": processes}),
                "rollout": self.rollout.model_copy(update={"extra_groups": extra}) if extra else self.rollout,
                "simulate": self.simulate.model_copy(update={"scoring": fewer}),
            }
        )

    def workload(self, task: str) -> Workload:
        """As given; else the tokens that `rollart check` assumes: half of the limits of the task."""
        if task in self.simulate.workloads:
            return self.simulate.workloads[task]
        (config,) = (each for each in self.tasks if each.name == task)
        shape = shape_of(config)
        tokens = {"prompt": shape.prompt, "observation": shape.prompt, "response": shape.decode}
        return Workload(turns=config.max_turns, **{key: max(1.0, value) for key, value in tokens.items()})

    @property
    def shape(self) -> ModelShape:
        return model_shape(self)


def load(path: Path, overrides: Sequence[str] = (), workload: Path | None = None) -> Scenario:
    """The scenario, with the keys of a `workload` file in its `simulate` section, then `overrides`. A pool of count 0
    is removed, so that a sweep over device mixes can leave one out.

    Raises ConfigError with one sentence per problem."""
    tree = loading.read(path)
    if workload is not None:
        for key, value in loading.read(workload).value.items():
            tree.set(f"simulate.{key}={yaml.safe_dump(value, default_flow_style=True, width=1 << 30)}")
    for override in overrides:
        tree.set(override)
    if isinstance(pools := tree.value.get("pools"), dict):
        empty = [name for name, pool in pools.items() if isinstance(pool, dict) and pool.get("count") == 0]
        for name in empty:
            del pools[name]
    scenario = loading.validated(tree, Scenario)
    if unknown := _unknown_gpu(scenario):
        raise ConfigError(f"{tree.place(('engine', 'device'))}: {unknown}")
    if wrong := [f"{tree.place(path)}: {why}" for path, why in unsupported(scenario)]:
        raise ConfigError("\n".join(wrong))
    return scenario


def _unknown_gpu(scenario: Scenario) -> str | None:
    """Why the speed of its engine is not known."""
    known = scenario.simulate.device or scenario.simulate.engines or scenario.pools
    if scenario.engine.device != "cuda" or known:
        return None
    return "engine.device is cuda; to simulate it, name the class of that GPU, for instance simulate.device: A100"
