"""The plan of a run before it starts: where each worker goes and why, the batch, and warnings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollart.config import ParallelConfig, PoolConfig, RunFile
from rollart.config.hardware import ENGINE_ROLES, MODEL_ROLES
from rollart.core.errors import RollartError
from rollart.hardware.balance import balanced
from rollart.hardware.devices import DeviceClass
from rollart.hardware.layout import misfits
from rollart.hardware.roofline import ModelShape, Roofline
from rollart.hardware.threads import thread_share
from rollart.placement.bindings import Binding, place
from rollart.placement.inventory import Inventory
from rollart.placement.mapping import Mapper
from rollart.placement.request import DeviceChoice, PlacementError, PlacementRequest
from rollart.placement.workload import (
    MemoryNeed,
    WorkloadShape,
    expected_batch,
    in_flight,
    longest_context,
    may_use,
    measured_shapes,
    model_config,
    model_shape,
    need_of,
    remedy,
    shape_of,
    shares,
    turn_seconds,
)
from rollart.rollout.mixture import Mixture

EXTERNAL = "external"


@dataclass(frozen=True, slots=True)
class TaskPlacement:
    """`pools` has the share of the task that each should serve while all are busy, predicted from its `shape`."""

    task: str
    environments: int
    affinity: str
    shape: WorkloadShape
    pools: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """`devices` has the label of each pool whose bindings do not show it: emulated, external, on whatever GPU there is.
    `memory`: what each pool that runs a model takes of its devices."""

    inventory: Inventory
    bindings: tuple[Binding, ...]
    devices: Mapping[str, str]
    tasks: tuple[TaskPlacement, ...]
    batch: Mapping[str, int]
    group_sizes: dict[str, int]
    in_flight: int
    warnings: tuple[str, ...]
    memory: Mapping[str, MemoryNeed]

    def of(self, pool: str) -> list[Binding]:
        return [binding for binding in self.bindings if binding.pool == pool]


def plan(run: RunFile, inventory: Inventory, measured: Mapping[str, WorkloadShape] | None = None) -> PlacementPlan:
    """`measured` are the shapes of tasks, by default of the run file's `measured` run. Raises RollartError."""
    classes, model = run.device_classes(), model_shape(run)
    run = _with_threads(run, inventory, model)
    if measured is None and run.measured is not None:
        measured = measured_shapes(run.measured)
    auto = Mapper(run, inventory, classes, model, measured).choices()
    warnings: list[str] = []
    requests: list[PlacementRequest] = []
    external: list[Binding] = []
    for name, pool in run.all_pools().items():
        if pool.urls:
            external += _external(name, pool)
        else:
            choice = auto.get(name) or _named(
                run=run, name=name, pool=pool, classes=classes, model=model, warnings=warnings
            )
            threads = {"train": run.training.thread_count} | dict.fromkeys(ENGINE_ROLES, run.engine.thread_count)
            requests.append(
                PlacementRequest(
                    pool=name,
                    role=pool.role,
                    workers=pool.count,
                    choices=choice.devices,
                    threads=threads.get(pool.role, 1),
                    why=choice.why,
                    devices=pool.tensor_parallel,
                )
            )
    bindings = (*place(requests, inventory), *external)
    memory = {
        binding.pool: need_of(run, run.all_pools()[binding.pool], model, classes[binding.device])
        for binding in bindings
        if binding.role in ("train", "generate") and binding.device in classes and not binding.url
    }
    return PlacementPlan(
        inventory=inventory,
        bindings=bindings,
        devices={name: _label(run, name, pool) for name, pool in run.all_pools().items()},
        tasks=tuple(_tasks(run, bindings, classes, model, measured)),
        batch=first_batch(run),
        group_sizes={task.name: task.group_size or run.training.group_size for task in run.tasks},
        in_flight=in_flight(run),
        warnings=(*warnings, *_warnings(bindings, inventory, classes), *_kv_warnings(run, model)),
        memory=memory,
    )


def first_batch(run: RunFile) -> dict[str, int]:
    """Groups of each task."""
    plans = {task.name: task.schedule.plan() for task in run.tasks if task.schedule}
    return Mixture({task.name: task.weight for task in run.tasks}, run.training.batch_groups, plans).quota(0)


def _with_threads(run: RunFile, inventory: Inventory, model: ModelShape) -> RunFile:
    """With the threads that the run file leaves open. On clusters one: workers reserve cores for more."""
    pools = [pool for pool in run.all_pools().values() if pool.role != "environment" and not pool.urls]
    workers = sum(pool.count * pool.tensor_parallel for pool in pools)
    share = thread_share(inventory.total("cpu"), workers, model.parameters) if inventory.overcommit else 1
    return _having_threads(run, run.engine.threads or share, run.training.threads or share)


def _having_threads(run: RunFile, engine: int, rank: int) -> RunFile:
    return run.model_copy(
        update={
            "engine": run.engine.model_copy(update={"threads": engine}),
            "training": run.training.model_copy(update={"threads": rank}),
        }
    )


def with_plan(run: RunFile, plan: PlacementPlan) -> RunFile:
    """The run file with what the plan has chosen: threads, and the layout of the trainer."""
    threads = {binding.role: binding.threads for binding in plan.bindings if not binding.url}
    run = _having_threads(run, threads.get("generate", run.engine.thread_count), threads.get("train", 1))
    layout = next((need.layout for need in plan.memory.values() if need.layout is not None), None)
    if layout is None or not run.training.parallel.auto:
        return run
    parallel = ParallelConfig(context=layout.context, tensor=layout.tensor, expert=layout.expert)
    return run.model_copy(update={"training": run.training.model_copy(update={"parallel": parallel})})


def with_ranks(run: RunFile, ranks: int) -> RunFile | None:
    """The run file with a smaller trainer; None if its model does not fit on that many ranks, or cannot be divided so.
    The layout is chosen again if `parallel` is `auto`; else it is as given, with fewer data-parallel ranks."""
    ((name, pool),) = run.pools_of("train").items()
    pool = pool.model_copy(update={"count": ranks})
    smaller = run.model_copy(update={"pools": {**run.pools, name: pool}})
    try:
        given = run.training.parallel.layout(ranks)
    except RollartError:
        return None
    classes = run.device_classes()
    needs = [(need_of(smaller, pool, model_shape(run), classes[each]), classes[each]) for each in pool.devices]
    need = next((need for need, device in needs if need.fits(device)), None)
    layout = given if need is None or need.layout is None else need.layout
    if need is None or any(misfits(layout, model_config(run))):
        return None
    parallel = ParallelConfig(context=layout.context, tensor=layout.tensor, expert=layout.expert)
    return smaller.model_copy(update={"training": run.training.model_copy(update={"parallel": parallel})})


def acts_as(run: RunFile, binding: Binding) -> tuple[str, float]:
    """The device class that a worker behaves like, and its slowdown."""
    pool = run.all_pools()[binding.pool]
    return (pool.devices[0], pool.emulate) if pool.emulate else (binding.device, 1.0)


def _named(
    run: RunFile,
    name: str,
    pool: PoolConfig,
    classes: Mapping[str, DeviceClass],
    model: ModelShape,
    warnings: list[str],
) -> DeviceChoice:
    """The classes that the user named, without those with too little memory."""
    if pool.emulate:
        return DeviceChoice(("cpu",), "a CPU engine, paced")
    if name not in run.pools:
        return DeviceChoice(pool.devices, "by default")
    if pool.role in MODEL_ROLES:  # a model of its own, whose size is not known here
        return DeviceChoice(pool.devices, "")
    needs = {each: need_of(run, pool, model, classes[each]) for each in pool.devices}
    fitting = tuple(each for each, need in needs.items() if need.fits(classes[each]))
    small = [(need, classes[each]) for each, need in needs.items() if each not in fitting]
    problems = [f"pool {name!r}: {need.shortfall(device)}" for need, device in small]
    if not fitting:
        if pool.role == "train":
            more = f"{remedy(run, pool, small[0][1])}; or "
            problems.insert(0, "training.parallel does not fit" if not run.training.parallel.auto else "no layout fits")
        else:
            more = "a smaller engine.kv_megabytes, engine.dtype: bfloat16, "
        raise PlacementError(f"{'; '.join(problems)}. What to do: {more}a larger class, or a smaller model.", name)
    warnings += [f"{problem}; it is not used" for problem in problems]
    return DeviceChoice(fitting, "")


def _external(name: str, pool: PoolConfig) -> Iterator[Binding]:
    for number, url in enumerate(pool.urls):
        device = pool.devices[0]
        yield Binding(
            pool=name,
            role=pool.role,
            worker=f"{name}-{number}",
            wanted=device,
            choices=pool.devices,
            device=device,
            node=url,
            units=0.0,
            threads=0,
            why="someone else runs it",
            devices=pool.tensor_parallel,
            url=url,
        )


def _label(run: RunFile, name: str, pool: PoolConfig) -> str:
    if name not in run.pools and {"train": run.training.device, "generate": run.engine.device}.get(pool.role) == "cuda":
        return "cuda"
    if pool.emulate:
        return f"emulated {pool.devices[0]} (1/{pool.emulate:g})"
    return f"{EXTERNAL} {pool.devices[0]}" if pool.urls else ""


def _tasks(
    run: RunFile,
    bindings: tuple[Binding, ...],
    classes: Mapping[str, DeviceClass],
    model: ModelShape,
    measured: Mapping[str, WorkloadShape] | None,
) -> Iterator[TaskPlacement]:
    batch, chunk = expected_batch(run), run.engine.prefill_chunk
    speeds: dict[str, list[Roofline]] = {}
    for binding in bindings:
        if binding.role == "generate":
            device, slowdown = acts_as(run, binding)
            speeds.setdefault(binding.pool, []).append(Roofline(classes[device], model, slowdown, binding.devices))
    shapes = {task.name: shape_of(task, measured) for task in run.tasks}
    seconds = {
        task.name: {
            pool: share / sum(1 / turn_seconds(roofline, shapes[task.name], batch, chunk) for roofline in rooflines)
            for pool, rooflines in speeds.items()
            if may_use(task, pool)
        }
        for task, share in shares(run.tasks)
    }
    pools = balanced(seconds)
    for task in run.tasks:
        affinity = task.affinity if isinstance(task.affinity, str) else ", ".join(task.affinity)
        yield TaskPlacement(task.name, run.environments.processes, affinity, shapes[task.name], pools[task.name])


def _kv_warnings(run: RunFile, model: ModelShape) -> Iterator[str]:
    longest, has = longest_context(run), run.engine.kv_megabytes * 1e6
    if (takes := longest * model.kv_bytes) > has:
        yield (
            f"the KV of one context of {longest} tokens takes {takes / 1e9:.3g} GB, more than engine.kv_megabytes "
            f"({has / 1e9:.3g} GB)"
        )


def _warnings(bindings: tuple[Binding, ...], inventory: Inventory, classes: Mapping[str, DeviceClass]) -> Iterator[str]:
    computing = [binding for binding in bindings if binding.role != "environment" and binding.device == "cpu"]
    threads, cores = sum(binding.threads * binding.devices for binding in computing), inventory.total("cpu")
    if inventory.overcommit and threads > cores:
        yield (
            f"engines and trainer ask for {threads} threads, this machine has {cores:g} cores; "
            "they will slow each other down"
        )
    unknown = [name for name in inventory.classes if name not in classes]
    if unknown:
        yield (
            f"the device class {', '.join(unknown)} is unknown, so nothing is placed there; define it in `devices`, "
            f"or label it as one of {', '.join(classes)}"
        )
