"""What a scenario does not say and a simulation makes up, with the key that changes it."""

from collections.abc import Iterator
from dataclasses import dataclass

from rollart.hardware.devices import DeviceClass
from rollart.placement.workload import need_of, remedy, training_changes
from rollart.simulator.distributions import mean_of
from rollart.simulator.scenario import Scenario, engine_defaults
from rollart.simulator.weight_transfer import WeightTransfer

_TOKENS = ("turns", "prompt", "observation", "response")
_SECONDS = ("reset", "step", "reward")
_LIMITS = {
    "max_batch": "sequences of an engine at once",
    "prefill_chunk": "tokens of a prefill pass",
    "kv_megabytes": "MB of weights and KV of an engine",
}


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
    if (part := scenario.simulate.one_in) > 1:
        left = scenario.training.batch_groups // part
        yield Assumption("fleet", f"one in {part} stands for all, {left} groups a batch are left", "simulate.one_in")
    yield from _seconds(scenario)
    yield from _weights(scenario)
    yield from _devices(scenario)


def _seconds(scenario: Scenario) -> Iterator[Assumption]:
    """Of environments and rewards."""
    for key in _SECONDS:
        given = scenario.simulate.workloads
        tasks = [t.name for t in scenario.tasks if t.name not in given or key not in given[t.name].model_fields_set]
        if tasks:
            yield Assumption(f"{key} of {', '.join(tasks)}", "0 s", f"simulate.workloads.<task>.{key}")
    if "scoring" not in scenario.simulate.model_fields_set:
        scoring = scenario.simulate.scoring
        value = (
            f"{scoring.concurrency} {scoring.where} calls at once, {mean_of(scoring.cold_start):g} s of a cold start"
        )
        yield Assumption("rewards", value, "simulate.scoring")


def _devices(scenario: Scenario) -> Iterator[Assumption]:
    """How fast they are, and what an engine has room for."""
    constants = scenario.simulate.constants
    if scenario.simulate.train is None:
        ((_, trainer),) = scenario.pools_of("train").items()
        fixed = "" if trainer.devices[0] == "cpu" else f", and {constants.train_fixed_s:g} s a step"
        value = f"at {constants.train_efficiency:.0%} of the peak FLOP/s{fixed}"
        yield Assumption("training", value, "simulate.constants.train_efficiency, train_fixed_s; simulate.train")
    modelled = [name for name in scenario.pools_of("generate") if name not in scenario.simulate.engines]
    if modelled:
        value = (
            f"{constants.compute_efficiency:.0%} of the peak FLOP/s, {constants.memory_efficiency:.0%} of the "
            f"bandwidth, {1e3 * constants.pass_s:g} ms a pass and {1e3 * constants.sequence_s:g} ms a sequence"
        )
        yield Assumption(f"engines of {', '.join(modelled)}", value, "simulate.constants; simulate.engines")
    for key, what in _LIMITS.items():
        if not getattr(scenario.engine, key):
            classes = {pool.devices[0] for pool in scenario.pools_of("generate").values()}
            values = {engine_defaults(name).get(key, f"{constants.kv_memory:.0%} of memory") for name in classes}
            yield Assumption(what, ", ".join(map(str, sorted(values, key=str))), f"engine.{key}")


def _weights(scenario: Scenario) -> Iterator[Assumption]:
    """The links, unless all are given, and how much of their rates is used, unless that or the rates are."""
    config, constants, transfer = scenario.simulate.weights, scenario.simulate.constants, WeightTransfer.of(scenario)
    used = {config.push: "push_efficiency", config.pull: "pull_efficiency"}
    if config.method == "collective":
        used = {config.push: "collective_efficiency"}
    keys = ["simulate.weights"] if {"method", "push", "pull"} - config.model_fields_set else []
    made_up = {link: key for link, key in used.items() if link not in scenario.simulate.links}
    if unset := [key for key in made_up.values() if key not in constants.model_fields_set]:
        keys.append(f"simulate.constants.{', '.join(unset)}")
    if not keys:
        return
    rates = ", ".join(
        f"{getattr(constants, key):.3g} of {link}'s {scenario.links[link]:g} GB/s" for link, key in used.items()
    )
    seconds = transfer.hidden_s + transfer.exposed_s
    value = f"{transfer.size / 1e9:.3g} GB by {config.method} at {rates}: {seconds:.3g} s a transfer"
    yield Assumption("weights", value, "; ".join(keys))


def device_memory(scenario: Scenario) -> dict[str, tuple[float, DeviceClass]]:
    """By pool: GB that weights, training and KV take of each device, and its class. Pools on CPUs share a node's."""
    found, classes = {}, scenario.device_classes()
    for name, pool in (scenario.pools_of("train") | scenario.pools_of("generate")).items():
        device = classes.get(pool.devices[0])
        if device is None or device.name == "cpu":
            continue
        need = need_of(scenario, pool, scenario.shape, device).gigabytes
        fills = pool.role == "generate" and not scenario.engine.kv_megabytes  # KV takes what weights leave
        found[name] = (scenario.simulate.constants.kv_memory * device.memory if fills else need, device)
    return found


def too_little_memory(scenario: Scenario) -> str | None:
    """Why training does not fit on its devices as configured, and what does."""
    ((name, pool),) = scenario.pools_of("train").items()
    device = scenario.device_classes().get(pool.devices[0])
    if device is None or (not (changes := training_changes(scenario, device, pool.count)) and changes is not None):
        return None
    text = f"pool {name!r}: {pool.count} {device.name} have too little memory to train this model as configured"
    return f"{text}; `rollart check` would refuse it. What fits: {remedy(scenario, pool, device)}"
