"""Automatic device mapping: which class each pool with `device: auto` gets, and why.

Classes are compared by speed per price, on the roofline. Training is compute-bound, unless its ranks wait for the link
between them. Generation depends on the tasks: what a turn adds to the context is prefilled, its answer is decoded in a
batch with others. Environments run on CPUs. A class with too little memory is never chosen.
"""

from collections.abc import Iterable, Mapping
from itertools import islice, product

from rollart.config import PoolConfig, RunFile, TaskConfig
from rollart.config.hardware import MODEL_ROLES
from rollart.core.errors import ConfigError
from rollart.hardware.devices import DeviceClass
from rollart.hardware.roofline import ModelShape, Roofline
from rollart.placement.inventory import Inventory
from rollart.placement.request import DeviceChoice
from rollart.placement.workload import (
    WorkloadShape,
    expected_batch,
    may_use,
    need_of,
    shape_of,
    shares,
    training_seconds,
    turn_seconds,
)

_POOL_WEIGHT = 1e-3  # breaks ties between mappings that are equal for the tasks
_MAX_MAPPINGS = 20_000  # more than nine classes for four pools


class Mapper:
    """Chooses the classes of one run on one inventory."""

    def __init__(
        self,
        run: RunFile,
        inventory: Inventory,
        classes: Mapping[str, DeviceClass],
        model: ModelShape,
        measured: Mapping[str, WorkloadShape] | None = None,
    ) -> None:
        self._run, self._inventory, self._model = run, inventory, model
        known = {name: classes[name] for name in inventory.classes if name in classes}
        # Where there are accelerators, models never run on CPUs.
        self._devices = {name: device for name, device in known.items() if name != "cpu"} or known
        self._shapes = {task.name: shape_of(task, measured) for task in run.tasks}
        batch, chunk = expected_batch(run), run.engine.prefill_chunk
        self._cost = {  # seconds x price of one turn
            (task.name, device.name): device.price
            * turn_seconds(Roofline(device, model), self._shapes[task.name], batch, chunk)
            for task in run.tasks
            for device in self._devices.values()
        }

    def choices(self) -> dict[str, DeviceChoice]:
        """For every pool with `device: auto`. Raises ConfigError if no device has enough memory for one."""
        left = {name: self._inventory.free(name) for name in self._inventory.classes}
        if self._inventory.overcommit:
            left["cpu"] = float("inf")
        pools = self._run.all_pools()
        for pool in pools.values():
            if not pool.auto and not pool.emulate and not pool.urls:
                left[pool.devices[0]] = left.get(pool.devices[0], 0.0) - pool.takes
        auto = {name: pool for name, pool in pools.items() if pool.auto}
        chosen: dict[str, DeviceChoice] = {}
        for name, pool in auto.items():
            if pool.role == "environment":
                chosen[name] = DeviceChoice(("cpu",), "environments run on CPUs")
            elif pool.role in MODEL_ROLES and not pool.urls:
                chosen[name] = DeviceChoice(("cpu",), f"a {pool.role} runs on CPUs unless its pool names a class")
            elif pool.role == "train":  # before generation, which has more to choose from
                chosen[name] = self._for_training(name, pool, left)
                left[chosen[name].devices[0]] -= pool.takes
        return chosen | self._for_generation({n: pool for n, pool in auto.items() if pool.role == "generate"}, left)

    def _fitting(self, name: str, pool: PoolConfig) -> list[str]:
        needs = {name: need_of(self._run, pool, self._model, device) for name, device in self._devices.items()}
        able = [name for name, device in self._devices.items() if needs[name].fits(device)]
        if not able:
            tried = "; ".join(needs[name].shortfall(device) for name, device in self._devices.items())
            tried = tried or "it has no known device"
            raise ConfigError(f"pool {name!r}: no device of {self._inventory.where} has enough memory: {tried}")
        return able

    def _for_training(self, name: str, pool: PoolConfig, left: Mapping[str, float]) -> DeviceChoice:
        rates, moving = {}, []
        for each in self._fitting(name, pool):
            device, tokens = self._devices[each], self._run.training.pack_tokens
            compute, move = training_seconds(device, self._model, pool.count, tokens)
            rates[each] = 1 / (device.price * max(compute, move))
            if move > compute:
                moving.append(each)
        order = sorted(rates, key=lambda each: (left[each] < pool.count, -rates[each]))
        bound = f"compute-bound, on {' and '.join(moving)} bound by its link" if moving else "compute-bound"
        return DeviceChoice(tuple(order), f"{bound}: {_compared(order, rates)}")

    def _for_generation(self, pools: Mapping[str, PoolConfig], left: Mapping[str, float]) -> dict[str, DeviceChoice]:
        """The best mapping for the tasks, of those that exceed the free devices least."""
        if not pools:
            return {}
        able = {name: self._fitting(name, pool) for name, pool in pools.items()}
        every = islice(product(*able.values()), _MAX_MAPPINGS)
        mappings = [dict(zip(pools, classes, strict=True)) for classes in every]
        best = max(mappings, key=lambda mapping: (-_missing(mapping, pools, left), self._score(mapping)))
        chosen = {}
        for name in pools:
            rates = {each: self._rate(name, each) for each in able[name]}
            order = sorted(rates, key=lambda each: (each != best[name], -rates[each]))
            chosen[name] = DeviceChoice(tuple(order), f"{self._described(name)}: {_compared(order, rates)}")
        return chosen

    def _score(self, mapping: Mapping[str, str]) -> float:
        """1.0 if every task may use a pool on the class that is best for it."""
        tasks = 0.0
        for task, share in shares(self._run.tasks):
            costs = [self._cost[task.name, device] for name, device in mapping.items() if may_use(task, name)]
            if costs:
                tasks += share * min(self._cost[task.name, device] for device in self._devices) / min(costs)
        own = [
            self._rate(name, device) / max(self._rate(name, each) for each in self._devices)
            for name, device in mapping.items()
        ]
        return tasks + _POOL_WEIGHT * sum(own)

    def _rate(self, pool: str, device: str) -> float:
        """Turns per price, for the mix of tasks that may use the pool."""
        return 1 / sum(share * self._cost[task.name, device] for task, share in shares(self._users(pool)))

    def _users(self, pool: str) -> list[TaskConfig]:
        return [task for task in self._run.tasks if may_use(task, pool)] or self._run.tasks

    def _described(self, pool: str) -> str:
        mix = [(self._shapes[task.name], share) for task, share in shares(self._users(pool))]
        mean = WorkloadShape(
            sum(shape.prompt * share for shape, share in mix), sum(shape.decode * share for shape, share in mix)
        )
        return f"{mean.kind} ({mean} tokens per turn)"


def _missing(mapping: Mapping[str, str], pools: Mapping[str, PoolConfig], left: Mapping[str, float]) -> float:
    """Devices that the mapping needs beyond those that are left."""
    used = dict.fromkeys(mapping.values(), 0.0)
    for name, device in mapping.items():
        used[device] += pools[name].takes
    return sum(max(0.0, number - max(0.0, left[device])) for device, number in used.items())


def _compared(order: Iterable[str], rates: Mapping[str, float]) -> str:
    best = max(rates.values())
    first, *others = [f"{rates[each] / best:.2f} per price on {each}" for each in order]
    return ", ".join([first, *(other.replace(" per price", "") for other in others)])
