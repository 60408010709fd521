"""Calibration: a run file with a `simulate` section that has the workload and paces of its event log.

Measured resets and rewards include the retries and hedges of the run, so the scenario has none of its own.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from rollart.config import loading
from rollart.config.yaml_tree import Dumper, Tree
from rollart.core.errors import RollartError
from rollart.simulator import fit
from rollart.simulator.constants import Constants
from rollart.simulator.distributions import Distribution, mean_of
from rollart.simulator.measurements import RunMeasurements, TaskMeasurements, measure
from rollart.simulator.scenario import Scenario, SimulateConfig, TransferConfig, Workload

_CHUNK = 512
SATURATED = 0.9  # share of the CPU seconds of a machine above which everything waits for a core
_LATE = 0.05  # share of the busy time of emulated engines
_WHOLE = ("turns", "prompt", "observation", "response")
_KEYS = (*_WHOLE, "reset", "step", "delay", "reward")


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measurements from the log of `folder`, and the scenario fitted to them."""

    folder: Path
    measurements: RunMeasurements
    scenario: Scenario
    engines: dict[str, fit.EngineFit]
    tree: dict[str, Any]

    def text(self) -> str:
        """The scenario file."""
        body = yaml.dump(
            self.tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None
        )
        how = "Run it with `rollart simulate`, change it with --set and --preset."
        return f"# Calibrated on the run in {self.folder}. {how}\n{body}"

    @property
    def warnings(self) -> list[str]:
        """Why predictions from this run may be wrong, each in a sentence."""
        host, found = self.measurements.host, []
        if host.cpu > SATURATED:
            found.append(
                f"the machine was saturated: {host.cpu:.0%} of its CPU seconds were used. What was measured includes "
                "waiting for a core, which the scenario takes for constant, so runs with less load are predicted too "
                "slow; calibrate on a run with fewer environments at once, or while the machine has nothing else to do"
            )
        if host.late > _LATE:
            found.append(
                f"emulated engines lagged behind their devices for {host.late:.0%} of their time, and the scenario has "
                "the speed of the devices; calibrate on a run with a larger `emulate`"
            )
        return found

    def fits(self, task: str) -> dict[str, tuple[list[float], float | Distribution]]:
        """By key of the workload: the measured values and their fit."""
        workload = self.scenario.workload(task)
        return {key: (data, getattr(workload, key)) for key, data in _data(self.measurements.tasks[task]).items()}


def calibrate(folder: Path, run_file: Path | None = None) -> Calibration:
    """From a run folder; `run_file` in place of the one in it. Raises RollartError."""
    measurements = measure(folder)
    path = run_file or folder / "run.yaml"
    if not path.is_file():
        raise RollartError(f"{folder} has no run.yaml; name the run file of this run with --run-file")
    tree = _as_measured(loading.read(path), measurements)
    blank = loading.validated(tree, Scenario)
    for log in measurements.tasks.values():
        # Of an agent that waited for no process, what came before its first request.
        log.values["reset"] += [seconds for number, seconds in log.starts if number <= blank.environments.processes]
    every = [each for generations in measurements.generations.values() for each in generations]
    cores = _shared_cores(blank, measurements)
    crowd = fit.Crowd(every, measurements.trainings, cores)
    paced = {name for name, pool in blank.pools.items() if pool.emulate}  # their speed is known
    engines = {
        pool: fit.engine(generations, crowd, blank.engine.prefill_chunk or _CHUNK)
        for pool, generations in measurements.generations.items()
        if pool not in paced
    }
    contention = max((each.contention for each in engines.values()), default=0.0)
    weights, links = _transfer(blank, measurements.swaps)
    section = SimulateConfig(
        workloads={name: _workload(log) for name, log in measurements.tasks.items()},
        engines={pool: each.pace for pool, each in engines.items()},
        train=fit.trainer(measurements.trainings, contention, crowd),
        contention=contention,
        cores=cores,
        weights=weights,
        links=links,
    )
    tree.value["simulate"] = section.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return Calibration(folder, measurements, loading.validated(tree, Scenario), engines, tree.value)


def _as_measured(tree: Tree, measurements: RunMeasurements) -> Tree:
    """The run file without what the measured times already include, with the devices that pools ran on."""
    run = tree.value
    for key in ("simulate", "measured"):
        run.pop(key, None)
    run.setdefault("environments", {}).update(retries=0, hedges=0)
    run.setdefault("rewards", {}).update(retries=0)
    for name, pool in run.get("pools", {}).items():
        if name in measurements.devices and not pool.get("emulate"):
            pool["device"] = measurements.devices[name]
    for task in run["tasks"]:
        if not task.get("env"):  # an agent: its part of a turn counts as an environment step
            task.pop("env", None)
            task.pop("agent", None)
    return tree


def _shared_cores(run: Scenario, measurements: RunMeasurements) -> int:
    """Of the machine on which engines and trainer computed together; 0 if they did not."""
    pools = [*run.pools_of("generate").values(), *run.pools_of("train").values()]
    together = all(pool.devices == ("cpu",) and not pool.emulate and not pool.urls for pool in pools)
    return measurements.host.cores if together and run.cluster is None else 0


def _data(log: TaskMeasurements) -> dict[str, list[float]]:
    """By key of the workload."""
    return {key: fit.uncut(log.values[key], log.cut[key]) for key in _KEYS if log.values[key]}


def _workload(log: TaskMeasurements) -> Workload:
    fitted: dict[str, Any] = {key: fit.distribution(data, key in _WHOLE) for key, data in _data(log).items()}
    failures = {f"{key}_failures": _share(log.failed[key], len(log.values[key])) for key in ("reset", "step", "reward")}
    return Workload(**fitted, **failures)


def _share(failed: int, succeeded: int) -> float:
    return float(f"{failed / (failed + succeeded):.4g}") if failed and succeeded else 0.0


def _transfer(scenario: Scenario, swaps: list[float]) -> tuple[TransferConfig, dict[str, float]]:
    """A link on which the weights of this model take the measured time."""
    seconds = median(swaps) if swaps else 0.0
    if seconds <= 0:
        return TransferConfig(), {}
    size = scenario.shape.parameters * scenario.shape.number_bytes
    rate = float(f"{size / (seconds * Constants().pull_efficiency) / 1e9:.4g}")
    links = {"instant": 1e6, "measured": rate}  # the time of a push is part of the training step
    return TransferConfig(push="instant", pull="measured"), links


def describe(fitted: float | Distribution) -> str:
    """In a few words."""
    if not isinstance(fitted, Distribution):
        return f"always {fitted:.3g}"
    cut = "" if fitted.max is None else f", at most {fitted.max:.3g}"
    if fitted.normal is not None:
        return f"normal, mean {fitted.normal.mean:.3g}, sd {fitted.normal.sd:.3g}{cut}"
    if fitted.lognormal is not None:
        return f"log-normal, median {fitted.lognormal.median or 0:.3g}, sigma {fitted.lognormal.sigma:.3g}{cut}"
    if fitted.exponential is not None:
        return f"exponential, mean {fitted.exponential:.3g}{cut}"
    if fitted.mixture is not None:
        if all(not isinstance(part.of, Distribution) for part in fitted.mixture):
            return f"{len(fitted.mixture)} values, mean {mean_of(fitted):.3g}"
        return "; or ".join(f"{part.share:.1%} {describe(part.of)}" for part in fitted.mixture)
    points = "".join(f", p{100 * p:g} {value:.3g}" for p, value in fitted.quantiles or () if p in (0.5, 0.95, 1.0))
    return f"quantiles, mean {mean_of(fitted):.3g}{points}"
