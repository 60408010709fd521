"""The scenario: a run file whose model may be a name, plus a `simulate` section that says what tasks are like.

All keys of the run file mean the same here: pools and devices, preset, alpha, redundancy, batch, processes, routing.
A run file that trains can be simulated as it is, once it has a `simulate` section.
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import Field, model_validator

from rollart.config import EngineConfig, ModelConfig, RunFile, Section, TaskConfig, loading
from rollart.config.base import Conflict, ImportPath, Natural, Positive, Seconds
from rollart.config.rollout import SCHEDULE_KEYS, Preset, RolloutConfig
from rollart.config.yaml_tree import did_you_mean
from rollart.core.errors import ConfigError
from rollart.engines.backends import unsupported
from rollart.hardware.roofline import ModelShape
from rollart.models import tiny
from rollart.simulate.constants import LINKS
from rollart.simulate.distributions import Spread

MODELS: dict[str, dict[str, Any]] = yaml.safe_load((files("rollart.simulate") / "models.yaml").read_text())
Share = Field(0.0, ge=0, lt=1)


class ScenarioModel(ModelConfig):
    name: str | None = Field(None, description=f"one of {', '.join(MODELS)}")
    config: dict[str, int] | None = Field(None, description="or the numbers of a model's config.json")

    @model_validator(mode="after")
    def _one_source(self) -> "ScenarioModel":
        if sum(each is not None for each in (self.path, self.tiny, self.name, self.config)) != 1:
            raise ValueError("give one of `name`, `config`, `path` and `tiny`")
        if self.name is not None and self.name not in MODELS:
            raise Conflict(f"no model is called {self.name!r}{did_you_mean(self.name, list(MODELS))}", "name")
        return self


class ScenarioTask(TaskConfig):
    env: ImportPath = Field("rollart.simulate.environments:ModelledEnvironment", description="not looked at")


class ScenarioEngine(EngineConfig):
    """What is left out is, on devices other than CPUs, what an engine for them would choose."""

    max_batch: int = Field(0, ge=0)
    prefill_chunk: int = Field(0, ge=0)
    kv_megabytes: int = Field(0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class Workload(Section):
    """One task. Turns and tokens are rounded; seconds are those of the environment and of the reward alone."""

    turns: Spread = Field(1.0, description="at most the task's max_turns")
    prompt: Spread = Field(256.0, description="tokens of the first observation, the same for a group")
    observation: Spread = Field(128.0, description="tokens of every other one")
    response: Spread = Field(256.0, description="tokens of every answer, at most sampling.max_tokens")
    reset: Spread = Field(0.0, description="seconds")
    step: Spread = Field(0.0, description="seconds")
    delay: Spread = Field(0.0, description="seconds more for every step, for instance {normal: {mean: 5, sd: 2}}")
    reset_failures: float = Share
    step_failures: float = Share
    reward: Spread = Field(0.0, description="seconds")
    reward_failures: float = Share


class Scoring(Section):
    """Where rewards are computed: on elastic functions, or on workers that are there all the time."""

    where: Literal["serverless", "dedicated"] = "serverless"
    concurrency: Positive = Field(1000, description="calls at the same time, on all functions or devices together")
    cold_start: Spread = Field(0.0, description="serverless: seconds, when no warm instance is free")
    keep_warm: Seconds = Field(60.0, description="serverless: seconds that an idle instance stays")
    device: str | None = Field(None, description="dedicated: the class of the devices, for their price and use")
    devices: Natural = Field(0, description="dedicated: how many")


class Transfer(Section):
    """How weights come to the engines; `push` and `pull` name links."""

    method: Literal["store", "collective"] = "store"
    push: str = "ethernet"
    pull: str = "infiniband"
    overlap: bool = Field(True, description="store: false stops training and generation until the weights are there")


class EnginePace(Section):
    """Measured seconds in place of the roofline."""

    fixed: float = Field(ge=0, description="of a forward pass")
    token: float = Field(ge=0, description="of every token in it")
    context: float = Field(0.0, ge=0, description="of every token of KV that it reads")


class TrainPace(Section):
    """Measured seconds in place of FLOPs."""

    fixed: float = Field(ge=0, description="of a step")
    token: float = Field(0.0, ge=0, description="of every token in its batch")


class Simulate(Section):
    workloads: dict[str, Workload] = Field(default_factory=dict, description="by task")
    warmup: Natural | None = Field(
        None, description="steps at the start that do not count; by default 1 and one for each version of alpha"
    )
    finite: bool = Field(False, description="start no rollouts for steps after the last, as a run that ends does")
    scoring: Scoring = Scoring()
    weights: Transfer = Transfer()
    links: dict[str, float] = Field(default_factory=dict, description=f"GB/s; there are {LINKS}")
    engines: dict[str, EnginePace] = Field(default_factory=dict, description="by pool: measured speed")
    train: TrainPace | None = None
    contention: float = Field(
        0.0, ge=0, description="engines and training share cores: while both work, either takes longer by this share"
    )
    colocated: bool = Field(False, description="training and generation take turns on the same devices")
    log: Literal["full", "off"] = Field("full", description="the event log of a real run, or none")
    sample_s: Seconds = Field(5.0, description="between two looks at what everything is doing")


class Scenario(RunFile):
    model: ScenarioModel
    tasks: list[ScenarioTask] = Field(min_length=1)  # type: ignore[assignment]
    engine: ScenarioEngine = ScenarioEngine()
    simulate: Simulate = Simulate()

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
                f"{self.training.steps} steps of training leave none to count after a warmup of {self.warmup}; take "
                "more steps, or set simulate.warmup",
                "training",
                "steps",
            )
        return self

    @property
    def warmup(self) -> int:
        """Steps that do not count. Until all batches that may be under way at once are, steps come too soon."""
        said = self.simulate.warmup
        return 1 + self.rollout.schedule().alpha if said is None else said

    @property
    def links(self) -> dict[str, float]:
        return LINKS | self.simulate.links

    def with_preset(self, preset: str) -> "Scenario":
        """The same under another preset, without the keys that it does not have. Raises ConfigError."""
        if preset not in get_args(Preset):
            raise ConfigError(f"there is no preset {preset!r}; there are {', '.join(get_args(Preset))}")
        free = {"rollart": SCHEDULE_KEYS, "start_bound": ("alpha",)}.get(preset, ())
        left = {
            key: value for key, value in self.rollout.model_dump().items() if key not in SCHEDULE_KEYS or key in free
        }
        return self.model_copy(update={"rollout": RolloutConfig(**left | {"preset": preset})})

    def workload(self, task: str) -> Workload:
        return self.simulate.workloads.get(task, Workload())

    @property
    def shape(self) -> ModelShape:
        number = 4 if self.engine.dtype == "float32" else 2
        if self.model.tiny:
            return ModelShape.of(tiny.sizes(self.model.tiny), number)
        if self.model.path:
            return ModelShape.of_folder(self.model.path, number)
        return ModelShape.of(self.model.config or MODELS[str(self.model.name)], number)


def load(path: Path, overrides: Sequence[str] = (), workload: Path | None = None) -> Scenario:
    """The scenario with the keys of a `workload` file in its `simulate` section, and then `overrides`. A pool of count
    0 is none, so that a sweep over mixes of devices can leave one out.

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
    if wrong := [f"{tree.place(path)}: {why}" for path, why in unsupported(scenario)]:
        raise ConfigError("\n".join(wrong))
    return scenario
