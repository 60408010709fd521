"""Plans: what the planner may choose, how a plan changes a scenario, all coarse splits of a budget, and an estimate of
the step time.

Everything else of a scenario stays. Prices are those of the device catalogue, per hour. Splits round down, so none
exceeds its budget. The estimate is from averages and the roofline: it takes milliseconds, and rules out most plans.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from rollart.config import AFFINITIES, PoolConfig
from rollart.core.errors import ConfigError
from rollart.engines.backends import with_tensor_parallel
from rollart.hardware.devices import DeviceClass
from rollart.hardware.roofline import Roofline
from rollart.hardware.training_memory import USABLE
from rollart.placement.workload import training_changes
from rollart.simulator.distributions import mean_of
from rollart.simulator.pass_cost import PassCost
from rollart.simulator.scenario import Scenario, ScenarioTask, Workload, engine_defaults
from rollart.simulator.services import training_seconds
from rollart.simulator.weight_transfer import WeightTransfer

SPENDING = (1.0, 0.85, 0.7, 0.5)  # shares of the budget
TRAINING = (0.08, 0.12, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5)  # shares of that for training
PARTS = 4  # the rest is divided between device classes in this many parts
ENGINE_BATCH = 256  # sequences in one pass, at most
NODE = 8  # devices; training takes whole nodes once it has one


@dataclass(frozen=True, slots=True)
class PlannedEngines:
    """`count` engines of `parallel` devices each."""

    device: str
    count: int
    parallel: int

    @property
    def devices(self) -> int:
        return self.count * self.parallel

    def __str__(self) -> str:
        return f"{self.devices} {self.device}"


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """`disaggregate`: the first of the engines prefill for the second."""

    trainer: str
    trainers: int
    engines: tuple[PlannedEngines, ...]
    alpha: int
    extra_members: int
    batch_groups: int
    group_size: int
    processes: int
    disaggregate: bool = False

    def price(self, classes: Mapping[str, DeviceClass]) -> float:
        generation = sum(classes[each.device].price * each.devices for each in self.engines)
        return generation + classes[self.trainer].price * self.trainers

    @property
    def generators(self) -> Counter[str]:
        """Devices for generation, by class."""
        return sum((Counter({each.device: each.devices}) for each in self.engines), Counter())

    @property
    def split(self) -> str:
        return f"{self.trainers} {self.trainer} train, {' + '.join(map(str, self.engines))} generate"


def plan_of(scenario: Scenario) -> ClusterPlan:
    """The plan of a scenario. Raises ConfigError if a pool has no device class."""
    ((_, train),) = scenario.pools_of("train").items()
    pairs = scenario.routing.disaggregate if isinstance(scenario.routing.disaggregate, list) else []
    generate = scenario.pools_of("generate")
    if train.auto or any(pool.auto for pool in generate.values()):
        raise ConfigError("a plan needs to know the hardware: give every pool a device class, not auto")
    if scenario.simulate.colocated:
        raise ConfigError("a plan splits devices between training and generation; leave out simulate.colocated")
    ordered = [generate[name] for name in pairs] + [pool for name, pool in generate.items() if name not in pairs]
    engines = (PlannedEngines(pool.devices[0], pool.workers, pool.tensor_parallel) for pool in ordered)
    schedule = scenario.rollout.schedule()
    return ClusterPlan(
        trainer=train.devices[0],
        trainers=train.count,
        engines=tuple(engines),
        alpha=schedule.alpha,
        extra_members=schedule.extra_members,
        batch_groups=scenario.training.batch_groups,
        group_size=scenario.training.group_size,
        processes=scenario.environments.processes,
        disaggregate=bool(pairs),
    )


def applied(plan: ClusterPlan, scenario: Scenario) -> Scenario:
    """The scenario with this plan. Pools of a class it already has keep their names, as tasks may name them."""
    trainer = next(iter(scenario.pools_of("train")))
    pools = {trainer: PoolConfig(role="train", device=plan.trainer, count=plan.trainers)}
    for name, each in zip(_names(plan, scenario), plan.engines, strict=True):
        kind = with_tensor_parallel(each.parallel)
        pools[name] = PoolConfig(
            role="generate", device=each.device, count=each.count, engine=kind, tensor_parallel=each.parallel
        )
    pools |= {name: pool for name, pool in scenario.pools.items() if pool.role == "environment"}
    generate = [name for name, pool in pools.items() if pool.role == "generate"]
    disaggregate = generate[:2] if plan.disaggregate else "never"
    if not plan.disaggregate and not isinstance(scenario.routing.disaggregate, list):
        disaggregate = scenario.routing.disaggregate
    rollout = {"preset": "rollart", "alpha": plan.alpha, "extra_members": plan.extra_members}
    training = {"batch_groups": plan.batch_groups, "group_size": plan.group_size}
    training |= training_changes(scenario, scenario.device_classes()[plan.trainer], plan.trainers) or {}
    changed = scenario.model_copy(
        update={
            "pools": pools,
            "tasks": [_task(task, generate) for task in scenario.tasks],
            "routing": scenario.routing.model_copy(update={"disaggregate": disaggregate}),
            "rollout": scenario.rollout.model_copy(update=rollout),
            "training": scenario.training.model_copy(update=training),
            "environments": scenario.environments.model_copy(update={"processes": plan.processes}),
        }
    )
    return changed.divisible()


def as_values(scenario: Scenario) -> dict[str, Any]:
    """As a file that `rollart simulate` and `rollart check` read. Limits of the engines that the scenario leaves open
    are those that it is simulated with, the KV the smallest of all pools: the defaults of a run are for CPUs."""
    values = scenario.model_dump(mode="json")
    engine = {key: value for key, value in values["engine"].items() if value != 0}
    devices = [pool.devices[0] for pool in scenario.pools_of("generate").values()]
    if "cpu" not in devices:
        engine = engine_defaults(devices[0]) | {"kv_megabytes": _kv_megabytes(scenario)} | engine
    return values | {"engine": engine}


def _kv_megabytes(scenario: Scenario) -> int:
    """What weights leave to KV on an engine of any pool."""
    classes, shape = scenario.device_classes(), scenario.shape
    share = min(USABLE, scenario.simulate.constants.kv_memory)
    memory = min(
        classes[pool.devices[0]].memory * pool.tensor_parallel for pool in scenario.pools_of("generate").values()
    )
    return max(1, int(share * memory * 1e9 - shape.parameters * shape.number_bytes) >> 20)


def _names(plan: ClusterPlan, scenario: Scenario) -> Iterator[str]:
    """Names of pools for the engines of a plan: those of the scenario with the same class, while there are any."""
    free = {name: pool.devices[0] for name, pool in scenario.pools_of("generate").items()}
    taken = set(scenario.pools)
    for each in plan.engines:
        name = next((name for name, device in free.items() if device == each.device), None)
        if name is None:
            name = next(n for n in (each.device.lower(), f"{each.device.lower()}_engines") if n not in taken)
        free.pop(name, None)
        taken.add(name)
        yield name


def _task(task: ScenarioTask, pools: Sequence[str]) -> ScenarioTask:
    """Pinned only to pools that exist."""
    if isinstance(task.affinity, str) and task.affinity in AFFINITIES:
        return task
    named = [task.affinity] if isinstance(task.affinity, str) else task.affinity
    left: str | list[str] = [name for name in named if name in pools] or "auto"
    return task.model_copy(update={"affinity": left})


def splits(
    scenario: Scenario, budget: float, kinds: Sequence[str], max_devices: Mapping[str, int] | None = None
) -> Iterator[ClusterPlan]:
    """Plans within the budget that train on the scenario's class and generate on `kinds`, on at most `max_devices` of
    each, with enough memory for both: `rollart check` accepts them. Engines come in multiples of `simulate.one_in`."""
    classes, base, limits = scenario.device_classes(), plan_of(scenario), max_devices or {}
    sizes = {kind: min_parallel(scenario, kind) for kind in kinds}
    parallel = {kind: size for kind, size in sizes.items() if size is not None}
    kinds = [kind for kind in kinds if kind in parallel]
    trains = cache(lambda ranks: training_changes(scenario, classes[base.trainer], ranks) is not None)
    mixes = [mix for mix in product(range(PARTS, -1, -1), repeat=len(kinds)) if sum(mix) == PARTS]
    seen: set[tuple[int, tuple[PlannedEngines, ...]]] = set()
    for spend in SPENDING:
        for share in TRAINING:
            trainers = math.floor(spend * budget * share / classes[base.trainer].price + 1e-9)
            trainers = trainers // NODE * NODE or trainers
            trainers = min(trainers, limits.get(base.trainer, trainers))
            left = dict(limits)
            if base.trainer in left:
                left[base.trainer] -= trainers
            money = spend * budget - trainers * classes[base.trainer].price
            for mix in mixes:
                parts = dict(zip(kinds, mix, strict=True))
                engines = _bought(
                    money, parts, parallel=parallel, classes=classes, max_devices=left, unit=scenario.simulate.one_in
                )
                if engines and (trainers, engines) not in seen and trainers and trains(trainers):
                    seen.add((trainers, engines))
                    yield replace(base, trainers=trainers, engines=engines, disaggregate=False)


def variations(plan: ClusterPlan) -> Iterator[tuple[str, ClusterPlan]]:
    """Other uses of the same hardware, one change at a time, with a name for each."""
    for alpha in {1, 2, 3} - {plan.alpha}:
        yield f"alpha {alpha}", replace(plan, alpha=alpha)
    for extra in {0, 1, 2} - {plan.extra_members}:
        yield f"{extra} extra members", replace(plan, extra_members=extra)
    if plan.batch_groups > 1 and plan.batch_groups % 2 == 0:
        shape = replace(plan, batch_groups=plan.batch_groups // 2, group_size=plan.group_size * 2)
        yield f"groups of {shape.group_size}", shape
    if plan.group_size >= 4 and plan.group_size % 2 == 0:
        shape = replace(plan, batch_groups=plan.batch_groups * 2, group_size=plan.group_size // 2)
        yield f"groups of {shape.group_size}", shape
    for processes in (plan.processes // 2, plan.processes * 2):
        if processes:
            yield f"{processes} processes", replace(plan, processes=processes)
    if len(plan.engines) == 2 and not plan.disaggregate:
        prefill, decode = (each.device for each in plan.engines)
        yield f"prefill on {prefill}, decode on {decode}", replace(plan, disaggregate=True)


def min_parallel(scenario: Scenario, kind: str) -> int | None:
    """As in the scenario's pool of this class, if that fits; else the smallest power of two that holds the model and
    two contexts, divides its heads and is within a node. None if there is none."""
    shape, device = scenario.shape, scenario.device_classes()[kind]
    longest = max(task.max_context for task in scenario.tasks)
    need = shape.parameters * shape.number_bytes + 2 * longest * shape.kv_bytes
    own = [pool.tensor_parallel for pool in scenario.pools_of("generate").values() if pool.devices[0] == kind]
    room = device.memory * 1e9 * scenario.simulate.constants.kv_memory
    for size in (*own, 1, 2, 4, 8):
        if need <= size * room and not shape.heads % size and size <= NODE:
            return size
    return None


def _bought(
    money: float,
    mix: Mapping[str, int],
    parallel: Mapping[str, int],
    classes: Mapping[str, DeviceClass],
    max_devices: Mapping[str, int],
    unit: int,
) -> tuple[PlannedEngines, ...]:
    """Engines for their shares of the money, in multiples of `unit`; what rounding leaves buys more, the most expensive
    first."""
    devices = {kind: parallel[kind] * unit for kind in mix}
    price = {kind: classes[kind].price * devices[kind] for kind in mix}
    limit = {kind: max_devices[kind] // devices[kind] if kind in max_devices else 1 << 30 for kind in mix}
    counts = {kind: min(limit[kind], math.floor(money * part / PARTS / price[kind])) for kind, part in mix.items()}
    left = money - sum(counts[kind] * price[kind] for kind in mix)
    for kind in sorted((kind for kind, part in mix.items() if part), key=lambda kind: -price[kind]):
        more = max(0, min(limit[kind] - counts[kind], math.floor(left / price[kind])))
        counts[kind] += more
        left -= more * price[kind]
    return tuple(PlannedEngines(kind, unit * count, parallel[kind]) for kind, count in counts.items() if count)


@dataclass(frozen=True, slots=True)
class Means:
    """Means of a trajectory of the mixture: tokens, of which `prefilled` may be more than once, and seconds outside
    engines."""

    turns: float
    tokens: float
    prefilled: float
    answered: float
    context: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds per step: the largest of training, generation of a batch, and the latency of a trajectory (rollout,
    training and weight transfer), which `alpha + 1` batches share."""

    train: float
    generate: float
    latency: float

    @property
    def step(self) -> float:
        return max(self.train, self.generate, self.latency)


def means_of(scenario: Scenario) -> Means:
    total = sum(task.weight for task in scenario.tasks)
    each = [(task.weight / total, _means(scenario.workload(task.name))) for task in scenario.tasks]
    return Means(*(sum(share * getattr(means, key) for share, means in each) for key in Means.__dataclass_fields__))


def _means(workload: Workload) -> Means:
    turns = max(1.0, mean_of(workload.turns))
    prompt, answered = mean_of(workload.prompt), turns * mean_of(workload.response)
    prefilled = prompt + (turns - 1) * mean_of(workload.observation)
    tokens = prefilled + answered
    context = tokens / 2
    if workload.window is not None:  # what is in it is prefilled again in each turn
        recent = min(workload.window, (tokens - prompt) / 2)
        prefilled, context = prompt + turns * recent, prompt + recent
    waiting = mean_of(workload.reset) + turns * (mean_of(workload.step) + mean_of(workload.delay))
    return Means(turns, tokens, prefilled, answered, context, waiting + mean_of(workload.reward))


def estimate(plan: ClusterPlan, scenario: Scenario, means: Means) -> Estimate:
    trajectories = plan.batch_groups * plan.group_size
    engines = sum(each.count for each in plan.engines)
    running = (plan.alpha + 1) * trajectories / engines
    rate, slowest = 0.0, 0.0
    for each in plan.engines:
        cost, room = _cost(each, scenario)
        batch = max(1.0, min(running, ENGINE_BATCH, room / means.context))
        fixed, slope = cost.decode(round(batch), batch * means.context)
        a_pass = fixed + slope * batch * means.context
        attended = means.prefilled * means.context
        prefill = cost.mixed(
            tokens=round(means.prefilled), attended=attended, kv=means.context, passes=means.turns, batch=0, context=0.0
        )
        rate += each.count / (prefill + means.answered * a_pass / batch)
        slowest = max(slowest, means.answered * a_pass + prefill)
    trainer = scenario.device_classes()[plan.trainer]
    train = training_seconds(scenario, trainer, plan.trainers)([means.tokens] * trajectories)
    latency = (means.waiting + slowest + train + transfer_seconds(scenario)) / (plan.alpha + 1)
    return Estimate(train, trajectories / rate, latency)


def transfer_seconds(scenario: Scenario) -> float:
    """From the end of a training step until engines have its weights."""
    weights = WeightTransfer.of(scenario)
    return weights.hidden_s + weights.exposed_s


def _cost(engines: PlannedEngines, scenario: Scenario) -> tuple[PassCost, float]:
    """The pass cost of one engine, and its room for KV in tokens."""
    shape, device = scenario.shape, scenario.device_classes()[engines.device]
    measured = [
        scenario.simulate.engines[name]
        for name, pool in scenario.pools_of("generate").items()
        if pool.devices[0] == engines.device and name in scenario.simulate.engines
    ]
    room = device.memory * 1e9 * engines.parallel * scenario.simulate.constants.kv_memory
    room -= shape.parameters * shape.number_bytes
    roofline = Roofline(device, shape, devices=engines.parallel)
    cost = PassCost(roofline, measured[0] if measured else None, scenario.simulate.constants)
    return cost, room / shape.kv_bytes
