"""The whole run file, and what its sections ask of each other."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from rollart.config.base import Conflict, Natural, Section
from rollart.config.hardware import (
    AFFINITIES,
    DEFAULT_POOLS,
    POOL_NAME,
    DeviceConfig,
    EngineConfig,
    PoolConfig,
    RoutingConfig,
    VllmConfig,
)
from rollart.config.model import ModelConfig
from rollart.config.rollout import EnvironmentsConfig, RewardsConfig, RolloutConfig
from rollart.config.task import TaskConfig
from rollart.config.training import CheckpointConfig, EvaluationConfig, TrainingConfig
from rollart.config.yaml_tree import did_you_mean
from rollart.hardware.devices import CATALOGUE, DeviceClass


class RunFile(Section):
    """Everything a run needs."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][\w.-]*$")
    seed: Natural = 0
    output: Path = Field(Path("runs"), description="run folders are made in here")
    model: ModelConfig
    tasks: Annotated[list[TaskConfig], Field(min_length=1)]
    rollout: RolloutConfig = RolloutConfig()
    cluster: str | None = Field(None, description="address of a Ray cluster; absent: this machine")
    weights: Path | None = Field(
        None, description="folder for weights, on every node that reads them; absent: in shared memory"
    )
    devices: dict[str, DeviceConfig] = Field(default_factory=dict, description="device classes of your own")
    pools: dict[Annotated[str, Field(pattern=POOL_NAME)], PoolConfig] = Field(
        default_factory=dict, description="what runs on which device class"
    )
    measured: Path | None = Field(
        None,
        description="folder of an earlier run; what it measured of its tasks settles `device: auto` and first routes",
    )
    routing: RoutingConfig = RoutingConfig()
    engine: EngineConfig = EngineConfig()
    vllm: VllmConfig = VllmConfig()
    environments: EnvironmentsConfig = EnvironmentsConfig()
    rewards: RewardsConfig = RewardsConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    simulate: Any = Field(None, description="for `rollart simulate`; training takes no notice of it")

    def pools_of(self, role: str) -> dict[str, PoolConfig]:
        """The pools of a role; what the run file leaves out runs on CPUs."""
        named = {name: pool for name, pool in self.pools.items() if pool.role == role}
        if named:
            return named
        count = self.engine.count if role == "generate" else 1
        return {DEFAULT_POOLS[role]: PoolConfig(role=role, device="cpu", count=count)}

    def all_pools(self) -> dict[str, PoolConfig]:
        """Those of the run file, in its order, and the ones that it leaves out."""
        return self.pools | {name: pool for role in DEFAULT_POOLS for name, pool in self.pools_of(role).items()}

    def device_classes(self) -> dict[str, DeviceClass]:
        """Every class that the run file may name: the catalogue, with the user's numbers, and the user's own."""
        return CATALOGUE | {name: device.as_class(name) for name, device in self.devices.items()}

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
        if self.model.warmup:
            for index, task in enumerate(self.tasks):
                if task.player is None:
                    raise Conflict(f"task {task.name!r} has no `player`, which model.warmup needs", "tasks", index)
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
