"""The time of a step from averages and the roofline: takes milliseconds, and is good enough to rule out most plans."""

from dataclasses import dataclass

from rollart.hardware.roofline import Roofline
from rollart.simulate.constants import MEMORY_FOR_KV, TRAINING_EFFICIENCY
from rollart.simulate.distributions import mean_of
from rollart.simulate.pass_cost import PassCost
from rollart.simulate.plans import ClusterPlan, PlannedEngines
from rollart.simulate.scenario import Scenario, Workload
from rollart.simulate.weight_transfer import WeightTransfer

_BATCH = 256


@dataclass(frozen=True, slots=True)
class Means:
    """Means of a trajectory of the mixture: tokens, and seconds outside engines."""

    turns: float
    prefilled: float
    answered: float
    context: float
    waiting: float

    @property
    def tokens(self) -> float:
        return self.prefilled + self.answered


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
    prefilled = mean_of(workload.prompt) + (turns - 1) * mean_of(workload.observation)
    answered = turns * mean_of(workload.response)
    waiting = mean_of(workload.reset) + turns * (mean_of(workload.step) + mean_of(workload.delay))
    return Means(turns, prefilled, answered, (prefilled + answered) / 2, waiting + mean_of(workload.reward))


def estimate(plan: ClusterPlan, scenario: Scenario, means: Means) -> Estimate:
    trajectories = plan.batch_groups * plan.group_size
    engines = sum(each.count for each in plan.engines)
    running = (plan.alpha + 1) * trajectories / engines
    rate, slowest = 0.0, 0.0
    for each in plan.engines:
        cost, room = _cost(each, scenario)
        batch = max(1.0, min(running, _BATCH, room / means.context))
        fixed, slope = cost.decode(round(batch), batch * means.context)
        a_pass = fixed + slope * batch * means.context
        attended = means.prefilled * means.context
        prefill = cost.mixed(round(means.prefilled), attended, means.context, means.turns, 0, 0.0)
        rate += each.count / (prefill + means.answered * a_pass / batch)
        slowest = max(slowest, means.answered * a_pass + prefill)
    train = _train(plan, scenario, means, trajectories)
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
    room = device.memory * 1e9 * engines.parallel * MEMORY_FOR_KV - shape.parameters * shape.number_bytes
    cost = PassCost(Roofline(device, shape, devices=engines.parallel), measured[0] if measured else None)
    return cost, room / shape.kv_bytes


def _train(plan: ClusterPlan, scenario: Scenario, means: Means, trajectories: int) -> float:
    pace = scenario.simulate.train
    if pace is not None:
        return pace.fixed + pace.token * trajectories * means.tokens
    shape = scenario.shape
    forward = means.tokens * (shape.token_flops + shape.attention_flops * means.tokens / 2)
    flops = scenario.device_classes()[plan.trainer].tflops * 1e12 * plan.trainers * TRAINING_EFFICIENCY
    return 3.0 * scenario.training.epochs * trajectories * forward / flops
