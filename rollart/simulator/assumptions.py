"""What a scenario does not say and a simulation makes up, with the key that changes it."""

from collections.abc import Iterator
from dataclasses import dataclass

from rollart.placement.workload import remedy, training_changes
from rollart.simulator.distributions import mean_of
from rollart.simulator.scenario import Scenario
from rollart.simulator.weight_transfer import WeightTransfer

_TOKENS = ("turns", "prompt", "observation", "response")


@dataclass(frozen=True, slots=True)
class Assumption:
    """`value` in words, and the `key` of the scenario that changes it."""

    what: str
    value: str
    key: str

    def __str__(self) -> str:
        return f"{self.what}: {self.value} ({self.key})"


def assumptions(scenario: Scenario) -> Iterator[Assumption]:
    for task in scenario.tasks:
        workload, given = scenario.workload(task.name), scenario.simulate.workloads.get(task.name)
        made_up = [key for key in _TOKENS if given is None or key not in given.model_fields_set]
        if given is None or len(made_up) == len(_TOKENS):
            value = ", ".join(f"{key} {mean_of(getattr(workload, key)):.4g}" for key in _TOKENS)
            yield Assumption(f"tokens of {task.name}", value, f"simulate.workloads.{task.name}")
            continue
        for key in made_up:
            if key == "observation" and mean_of(workload.turns) <= 1:
                continue
            value = f"{mean_of(getattr(workload, key)):.4g}"
            yield Assumption(f"{key} of {task.name}", value, f"simulate.workloads.{task.name}.{key}")
    yield from _weights(scenario)
    if scenario.simulate.train is None:
        share = scenario.simulate.constants.train_efficiency
        yield Assumption("training", f"at {share:.0%} of the peak FLOP/s", "simulate.constants.train_efficiency")
    if not scenario.simulate.engines:
        yield Assumption("engines", "as fast as the roofline of their devices allows", "simulate.engines")


def _weights(scenario: Scenario) -> Iterator[Assumption]:
    config, transfer = scenario.simulate.weights, WeightTransfer.of(scenario)
    left = {"method", "push", "pull"} - config.model_fields_set
    if "weights" in scenario.simulate.model_fields_set and not left:
        return
    links = [config.push] if config.method == "collective" else [config.push, config.pull]
    rates = ", ".join(f"{link} of {scenario.links[link]:g} GB/s" for link in dict.fromkeys(links))
    seconds = transfer.hidden_s + transfer.exposed_s
    value = f"{transfer.size / 1e9:.3g} GB by {config.method} over {rates}: {seconds:.3g} s a transfer"
    yield Assumption("weights", value, "simulate.weights")


def too_little_memory(scenario: Scenario) -> str | None:
    """Why training does not fit on its devices as configured, and what does."""
    ((name, pool),) = scenario.pools_of("train").items()
    device = scenario.device_classes().get(pool.devices[0])
    if device is None or (not (changes := training_changes(scenario, device, pool.count)) and changes is not None):
        return None
    text = f"pool {name!r}: {pool.count} {device.name} have too little memory to train this model as configured"
    return f"{text}; `rollart check` would refuse it. What fits: {remedy(scenario, pool, device)}"
