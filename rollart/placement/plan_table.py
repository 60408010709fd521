"""The plan of a run as tables."""

from collections import Counter
from collections.abc import Mapping
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollart.config import INVOKERS, RewardConfig, RunFile
from rollart.observe.draw import table
from rollart.placement.bindings import Binding
from rollart.placement.plan import PlacementPlan
from rollart.placement.request import described

_NAMED_NODES = 3
_MIN_SHARE = 0.05


def placed(run: RunFile, plan: PlacementPlan) -> RenderableType:
    parts: list[RenderableType] = [
        Text(f"Where everything goes: {plan.inventory.where}", style="bold"),
        Text("  " + "; ".join(described(plan.inventory.nodes)), style="dim"),
        _pools(run, plan),
        Text(),
        _tasks(plan),
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
    rows = table("task", "environments", "affinity", "tokens per turn", "pool", "about")
    for task in plan.tasks:
        about = f"{task.shape.kind}, {task.shape.source}"
        up_to = f"up to {task.environments}"
        rows.add_row(task.task, up_to, task.affinity, str(task.shape), _split(task.pools), about)
    return rows


def _split(pools: Mapping[str, float]) -> str:
    large = sorted((name for name in pools if pools[name] >= _MIN_SHARE), key=lambda name: -pools[name])
    return large[0] if len(large) == 1 else ", ".join(f"{pools[name]:.0%} {name}" for name in large)


def _batch(plan: PlacementPlan) -> Text:
    groups = ", ".join(f"{number} groups of {task}" for task, number in plan.batch.items())
    total = sum(plan.batch.values()) * plan.group_size
    first = f"First batch: {groups}; {plan.group_size} trajectories each, {total} in all."
    return Text(f"{first} At most {plan.in_flight} trajectories in the pipeline.")
