"""The plan of a run as tables."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollart.config import INVOKERS, RewardConfig, RunFile
from rollart.observe.draw import table
from rollart.placement.bindings import Binding
from rollart.placement.plan import PlacementPlan
from rollart.placement.request import described
from rollart.placement.workload import longest_context, model_shape

_NAMED_NODES = 3
_ESTIMATED = "estimated: half of what max_context, max_turns and sampling.max_tokens of the task allow"
_MIN_SHARE = 0.05


def placed(run: RunFile, plan: PlacementPlan) -> RenderableType:
    parts: list[RenderableType] = [
        Text(f"Where everything goes: {plan.inventory.where}", style="bold"),
        Text("  " + "; ".join(described(plan.inventory.nodes)), style="dim"),
        _pools(run, plan),
        Text(),
        _tasks(plan),
        Text(),
        *_memory(run, plan),
        Text(),
        _batch(plan),
    ]
    return Group(*parts, *(Text(f"! {warning}", style="yellow") for warning in plan.warnings))


def _pools(run: RunFile, plan: PlacementPlan) -> Table:
    rows = table("role", "pool", "workers", "device", "node", "about")
    about = f"preset {run.rollout.preset}, alpha {run.rollout.schedule().alpha}"
    rows.add_row("control", "controller", "1", "cpu", "here", about)
    for pool, bindings in groupby(plan.bindings, key=lambda binding: binding.pool):
        for (role, device, why), same in groupby(bindings, key=lambda each: (each.role, each.device, each.why)):
            alike = list(same)
            rows.add_row(role, pool, str(len(alike)), plan.devices[pool] or device, _nodes(alike), why)
    for reward in dict.fromkeys(_reward(run, task.reward) for task in run.tasks):
        rows.add_row("reward", *reward, "started when needed")
    return rows


def _reward(run: RunFile, reward: RewardConfig) -> tuple[str, str, str, str]:
    invoker = INVOKERS[reward.invoker]
    if not invoker.transport:
        return "rewards", f"up to {run.rewards.workers}", "cpu", "here"
    where = ", ".join(filter(None, [invoker.title, reward.name])) or str(reward.url)
    return reward.invoker, f"up to {reward.concurrency}", reward.device or "cpu", where


def _nodes(bindings: list[Binding]) -> str:
    counts = Counter(binding.node for binding in bindings)
    low, high = min(counts.values()), max(counts.values())
    if high == 1 or len(counts) == 1:
        shown = list(counts)[:_NAMED_NODES]
        return ", ".join([*shown, f"and {len(counts) - len(shown)} more"] if len(counts) > len(shown) else shown)
    if len(counts) > _NAMED_NODES:
        return f"{len(counts)} nodes, {low if low == high else f'{low}-{high}'} each"
    return ", ".join(f"{number} on {node}" for node, number in counts.items())


def _tasks(plan: PlacementPlan) -> Table:
    rows = table("task", "processes", "affinity", "in : out", "pool", "about")
    for task in plan.tasks:
        about = f"{task.shape.kind}, {task.shape.source}"
        up_to = f"up to {task.environments}"
        rows.add_row(task.task, up_to, task.affinity, task.shape.ratio, _split(task.pools), about)
    if any(task.shape.source == "estimated" for task in plan.tasks):
        rows.caption, rows.caption_justify = _ESTIMATED, "left"
    return rows


def _split(pools: Mapping[str, float]) -> str:
    large = sorted((name for name in pools if pools[name] >= _MIN_SHARE), key=lambda name: -pools[name])
    return large[0] if len(large) == 1 else ", ".join(f"{pools[name]:.0%} {name}" for name in large)


def _memory(run: RunFile, plan: PlacementPlan) -> Iterator[RenderableType]:
    """By pool, of each of its devices; the trainer at its peak, with the longest context."""
    shown = ("parameters", "gradients", "optimizer", "activations", "KV")
    columns = {}
    size = model_shape(run).parameters
    model = f"{run.model.name or 'the model'}, {_count(size)} parameters"
    contexts = f"with contexts of up to {longest_context(run)} tokens"
    yield Text(f"Memory of each device, in GB, for {model}, {contexts}", style="bold")
    for pool, need in plan.memory.items():
        device = run.device_classes()[plan.of(pool)[0].device]
        other = sum(size for name, size in need.parts.items() if name not in shown)
        room = f"{device.memory:g}"
        if device.name == "cpu":
            room = "GPU" if plan.devices[pool] == "cuda" else "node"
        parts = [_gigabytes(need.parts[name]) if name in need.parts else "" for name in shown]
        columns[pool] = (*parts, _gigabytes(other) if other else "", _gigabytes(1e9 * need.gigabytes), room)
    rows = table("part", *columns)
    for values in zip((*shown, "other", "total", "of"), *columns.values(), strict=True):
        rows.add_row(*values)
    yield rows
    for pool, need in plan.memory.items():
        if need.layout is not None:
            chosen = f"; chosen: {need.why}" if run.training.parallel.auto else ""
            host = f"; {_gigabytes(need.host)} GB more in the memory of the host" if need.host else ""
            reference = ", the reference" if need.parts.get("reference") else ""
            critic = ", the critic" if need.parts.get("critic") else ""
            rest = f"gathered weights, recomputed activations, logits{reference}{critic}"
            yield Text(f"  {pool}: {need.layout}{chosen}{host}. Other: {rest}.", style="dim")


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g}" if size >= 5e5 else "0"


def _batch(plan: PlacementPlan) -> Text:
    groups = ", ".join(f"{number} groups of {task}" for task, number in plan.batch.items())
    sizes = plan.group_sizes
    total = sum(number * sizes[task] for task, number in plan.batch.items())
    each = " or ".join(map(str, sorted({*sizes.values()})))
    first = f"First batch: {groups}; {each} trajectories each, {total} in all."
    return Text(f"{first} At most {plan.in_flight} trajectories in the pipeline.")
