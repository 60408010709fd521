"""The whole run file, and the checks between its sections."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rollart.config.algorithm import TEACHER_LOSSES, AlgorithmConfig
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
from rollart.config.rollout import EnvironmentsConfig, RewardsConfig, RolloutConfig, SampleConfig
from rollart.config.task import INVOKERS, TaskConfig
from rollart.config.training import (
    UNKNOWN_SIZE,
    CheckpointConfig,
    EvaluationConfig,
    LedgerConfig,
    ModelConfig,
    PreferenceConfig,
    TrainingConfig,
    model_source,
)
from rollart.config.yaml_tree import did_you_mean
from rollart.hardware.devices import CATALOGUE, DeviceClass


class ObserveConfig(Section):
    """Where the numbers of the run go besides its folder."""

    export: list[Literal["tensorboard", "wandb", "mlflow", "trackio", "prometheus", "otel"]] = Field(
        ["tensorboard"],
        description="exporters; wandb is offline unless WANDB_MODE is set, mlflow writes into the run folder unless "
        "MLFLOW_TRACKING_URI is, otel sends to OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    prometheus_port: Natural = Field(9464, le=65535, description="port of Prometheus' scrape endpoint, on loopback")


class RunFile(Section):
    """Everything a run needs."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][\w.-]*$", description="name of the run, and of its folder")
    seed: Natural = Field(0, description="seed of episodes, sampling and weights")
    output: Path = Field(Path("runs"), description="folder of the run folders")
    model: Annotated[ModelConfig, BeforeValidator(model_source, json_schema_input_type=str | ModelConfig)] = Field(
        description="where the policy comes from: a folder, a hub id or a section"
    )
    tasks: Annotated[list[TaskConfig], Field(min_length=1, description="what the policy learns")]
    rollout: RolloutConfig = RolloutConfig()
    cluster: str | None = Field(None, description="address of a Ray cluster; default: this machine")
    weights: Path | None = Field(
        None, description="folder of the published weights, shared by all nodes; default: shared memory"
    )
    devices: dict[str, DeviceConfig] = Field(default_factory=dict, description="device classes of your own")
    pools: dict[Annotated[str, Field(pattern=POOL_NAME)], PoolConfig] = Field(
        default_factory=dict, description="which workers run on which device class, by name"
    )
    measured: Path | None = Field(
        None, description="folder of an earlier run, whose measured tasks decide `device: auto` and the first routes"
    )
    routing: RoutingConfig = RoutingConfig()
    engine: EngineConfig = EngineConfig()
    vllm: VllmConfig = VllmConfig()
    environments: EnvironmentsConfig = EnvironmentsConfig()
    rewards: RewardsConfig = RewardsConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sample: SampleConfig = SampleConfig()
    preference: PreferenceConfig = PreferenceConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    ledger: LedgerConfig = LedgerConfig()
    observe: ObserveConfig = ObserveConfig()
    simulate: Any = Field(None, description="for `rollart simulate`; training ignores it")

    def pools_of(self, role: str) -> dict[str, PoolConfig]:
        """The pools of a role; by default, one on CPUs."""
        named = {name: pool for name, pool in self.pools.items() if pool.role == role}
        if named:
            return named
        count = self.engine.count if role == "generate" else 1
        return {DEFAULT_POOLS[role]: PoolConfig(role=role, device="cpu", count=count)}

    def all_pools(self) -> dict[str, PoolConfig]:
        """Those of the run file, in its order, and the default ones."""
        return self.pools | {name: pool for role in DEFAULT_POOLS for name, pool in self.pools_of(role).items()}

    def teacher_of(self, task: TaskConfig) -> str | None:
        """The pool that teaches a task: the one that it names or, if no task names any, the only one."""
        if any(each.teacher for each in self.tasks):
            return task.teacher
        pools = [name for name, pool in self.pools.items() if pool.role == "teacher"]
        return pools[0] if len(pools) == 1 else None

    def device_classes(self) -> dict[str, DeviceClass]:
        """The catalogue, with the numbers of the run file, and the classes that it defines."""
        return CATALOGUE | {name: device.as_class(name) for name, device in self.devices.items()}

    @model_validator(mode="after")
    def _learning_rate_by_model(self) -> "RunFile":
        """The default of a tiny model would ruin a pretrained one. `app.preflight` knows the size of that."""
        if self.model.tiny is None and "lr" not in self.training.model_fields_set:
            lr = self.training.usual_lr(UNKNOWN_SIZE)
            object.__setattr__(self, "training", self.training.model_copy(update={"lr": lr}))  # it is frozen
        return self

    @model_validator(mode="after")
    def _algorithms_of_tasks(self) -> "RunFile":
        """What a task leaves out is the run's, so that a resolved run file has all of it."""
        tasks = [*map(self._with_algorithm, range(len(self.tasks)), self.tasks)]
        object.__setattr__(self, "tasks", tasks)
        return self

    def _with_algorithm(self, index: int, task: TaskConfig) -> TaskConfig:
        if task.algorithm is None:
            return task
        own, run = task.algorithm, self.training.algorithm
        merged = run.model_copy(update={key: getattr(own, key) for key in own.model_fields_set})
        for key in ("evidence_power", "expert_balance"):
            if getattr(merged, key) != getattr(run, key):
                what = f"{key} is of whole updates: set it in training.algorithm, not for task {task.name!r}"
                raise Conflict(what, "tasks", index, "algorithm", key)
        return task.model_copy(update={"algorithm": merged})

    def algorithm_of(self, task: TaskConfig) -> AlgorithmConfig:
        return task.algorithm or self.training.algorithm

    def algorithms(self) -> list[AlgorithmConfig]:
        """That of the run, and those of tasks."""
        return [self.training.algorithm, *(task.algorithm for task in self.tasks if task.algorithm)]

    @model_validator(mode="after")
    def _check(self) -> "RunFile":
        self._check_devices()
        self._check_pools()
        self._check_affinities()
        self._check_disaggregation()
        self._check_batch()
        if self.ledger.control and self.rollout.players not in ("auto", 0):
            raise Conflict("ledger.control records one process: set players to 0", "rollout", "players")
        for index, task in enumerate(self.tasks):
            self._check_task(index, task)
        return self

    def _check_devices(self) -> None:
        for name, device in self.devices.items():
            missing = [key for key in ("tflops", "bandwidth", "memory") if getattr(device, key) is None]
            if missing and name not in CATALOGUE:
                raise Conflict(f"{name!r} is not in the catalogue: it needs {' and '.join(missing)}", "devices", name)
        known = [*self.devices, *(name for name in CATALOGUE if name not in self.devices)]
        for name, pool in self.pools.items():
            for device_class in pool.devices:
                if device_class not in known and not pool.auto:
                    hint = did_you_mean(device_class, known) or f"; define it in `devices`, or use {', '.join(known)}"
                    raise Conflict(f"there is no device class {device_class!r}{hint}", "pools", name, "device")

    def _check_pools(self) -> None:
        for role, default in DEFAULT_POOLS.items():
            if default in self.pools and self.pools[default].role != role:
                what = f"the name {default!r} is reserved for pools of role {role}; choose another"
                raise Conflict(what, "pools", default)
        roles = [pool.role for pool in self.pools.values()]
        if "generate" in roles and self.engine.count != 1:
            raise Conflict("engine.count is for runs without pools of role generate", "engine", "count")
        if roles.count("train") > 1:
            raise Conflict("there can be only one pool of role train", "pools", list(self.pools_of("train"))[-1])

    def _check_affinities(self) -> None:
        pools = self.pools_of("generate")
        for index, task in enumerate(self.tasks):
            pinned = isinstance(task.affinity, list)
            for name in task.affinity if isinstance(task.affinity, list) else [task.affinity]:
                if name not in pools and (pinned or name not in AFFINITIES):
                    raise Conflict(
                        f"affinity {name!r} of task {task.name!r} is neither one of {', '.join(AFFINITIES)} nor a pool "
                        f"of role generate ({', '.join(sorted(pools))})",
                        *("tasks", index, "affinity"),
                    )

    def _check_disaggregation(self) -> None:
        names, pools = self.routing.disaggregate, self.pools_of("generate")
        if isinstance(names, list) and (len(names) != 2 or any(name not in pools for name in names)):
            raise Conflict(
                "disaggregate names two pools of role generate: one that prefills and one that decodes",
                *("routing", "disaggregate"),
            )

    def _check_batch(self) -> None:
        names = [task.name for task in self.tasks]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise Conflict(f"two tasks are named {name!r}; names must differ", "tasks", index, "name")
        trained = sum(task.weight > 0 for task in self.tasks)
        if not trained:
            raise Conflict("every task has weight 0: nothing would be trained", "tasks", 0, "weight")
        plans = [(task.weight, task.schedule.plan() if task.schedule else None) for task in self.tasks]
        for step in sorted({0, *(step for _, plan in plans if plan for step, _ in plan.points)}):
            if not any(weight * (plan.at(step) if plan else 1.0) for weight, plan in plans):
                raise Conflict(f"every task has weight 0 at step {step}: nothing would be trained", "tasks")
        if self.training.batch_groups < trained:
            raise Conflict(
                f"training.batch_groups is {self.training.batch_groups}, too few for {trained} tasks: "
                "every task needs a group in every batch",
                *("training", "batch_groups"),
            )

    def _check_judges(self, index: int, task: TaskConfig) -> None:
        for name, place in ((task.reward.pool, ("reward", "pool")), (task.opponent, ("opponent",))):
            if name is not None:
                self._check_pool_of("judge", name, "tasks", index, *place)
        if task.opponent is not None and (task.agent is not None or task.dataset is not None):
            message = f"task {task.name!r} has no environment, so nothing plays against its `opponent`"
            raise Conflict(message, "tasks", index, "opponent")
        away = [name for name, pool in self.pools_of("environment").items() if pool.urls]
        if away and task.opponent is not None and not self.pools[task.opponent].urls:
            message = f"the environments of pool {away[0]!r} are run by someone else and cannot reach the opponent"
            raise Conflict(f"{message}: give pool {task.opponent!r} `urls`", "tasks", index, "opponent")

    def _check_pool_of(self, role: str, name: str, *place: str | int) -> None:
        known = [each for each, pool in self.pools.items() if pool.role == role]
        if name not in known:
            hint = did_you_mean(name, known) or f"; it has {', '.join(known) or 'none'}"
            raise Conflict(f"the run file has no pool {name!r} of role {role}{hint}", *place)

    def _check_teacher(self, index: int, task: TaskConfig) -> None:
        if task.teacher is not None:
            self._check_pool_of("teacher", task.teacher, "tasks", index, "teacher")
        if not task.weight or self.teacher_of(task) is not None:
            return
        # A pass has samples of all tasks, and a loss that compares with teachers needs them in all.
        losses = [each.loss for each in self.algorithms() if each.loss in TEACHER_LOSSES]
        if losses or self.algorithm_of(task).advantage == "opd":
            what = f"loss {losses[0]}" if losses else "advantage opd"
            message = f"{what} learns from teachers, and task {task.name!r} has none: give it a `teacher`"
            raise Conflict(message, "tasks", index)

    def _check_task(self, index: int, task: TaskConfig) -> None:
        self._check_teacher(index, task)
        self._check_judges(index, task)
        if INVOKERS[task.reward.invoker].cluster and self.cluster is None:
            what = f"invoker {task.reward.invoker} needs `cluster`, the address of a Ray cluster"
            raise Conflict(what, "tasks", index, "reward")
        if self.model.warmup and self.model.warmup.per_task and task.weight and task.player is None:
            raise Conflict(f"task {task.name!r} has no `player`, which model.warmup needs", "tasks", index)
        if self.model.tiny and task.max_context > self.model.tiny.context:
            raise Conflict(
                f"tasks.{task.name}.max_context is {task.max_context}, "
                f"more than the model's context of {self.model.tiny.context}",
                *("tasks", index, "max_context"),
            )
