"""Predicted against measured: calibrate on one real run of each family, predict others by simulation, then run those.

Families, each with a run to calibrate on: `embedded`, the engine of this package and the trainer share the cores of
this machine; `fleet`, engines paced to H800 and H20, which mostly sleep; `agents`, programs that play through the
gateway, on such a fleet; `vllm`, its CPU build, if ROLLART_VLLM_PYTHON names a Python that has it. A configuration
changes keys of the run file, and the same keys of the calibrated scenario, as `rollart simulate --set` does; slower or
failing environments change its workload. Nothing else differs between them, and nothing is fitted to any run but
the first of its family, from whose log alone all predictions of the family are made before any other run begins.

Step time is from the end of the first training step to the end of the last, per step. The learning rate is so small
that the policy stays what it is: this is about time. A run has few steps, each as long as the slowest of its batch:
`spread` is by how much the mean step of such a run varies from one simulated seed to another, and no prediction can be
closer than that. The machine should have nothing else to do: what was measured while more than 9 in 10 of its CPU
seconds were used is `saturated`, and its error says little; so does that of a run whose `training` took another number
of seconds per token than in the run that was calibrated on. With `--keep`, runs that are there are not run again.
Last line: `median_error` and `worst_error` over all configurations, relative to the measured step time, and
`self_errors`, those of the runs that were calibrated on.
"""

import argparse
import asyncio
import json
import os
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median, pstdev
from typing import Any

from benchmarks.cells import Cells, add_options, kept_cells
from benchmarks.predict_families import FAMILIES, Family, Setting, changed, run_file, stretched
from rollart.config import EnvironmentsConfig, loading
from rollart.config.yaml_tree import Tree
from rollart.core.event_log import read_events
from rollart.core.events import StepDone
from rollart.fleet import controller
from rollart.models.tiny import make
from rollart.simulator.calibration import SATURATED, calibrate
from rollart.simulator.distributions import Distribution, MixturePart, draw_of
from rollart.simulator.measurements import measure
from rollart.simulator.scenario import Scenario, Workload
from rollart.simulator.simulation import simulate

NEVER = 1e6  # seconds of a call that hangs
SMOKE = {"training.batch_groups": 2, "environments.processes": 8}


@dataclass(frozen=True, slots=True)
class Prediction:
    """`foreseen` are simulated seconds of a step by seed. `real` has `step_s`, and what the machine was doing: `cpu` is
    the share of its CPU seconds that were used, `late` the share of emulated time by which engines lagged, `token_s`
    the training seconds per token; `training` is that over the one of the run that was calibrated on."""

    name: str
    foreseen: list[float]
    real: dict[str, float]
    training: float = 1.0

    @property
    def predicted_s(self) -> float:
        return mean(self.foreseen)

    @property
    def spread(self) -> float:
        return pstdev(self.foreseen) / self.predicted_s

    @property
    def error(self) -> float:
        return self.predicted_s / self.real["step_s"] - 1

    @property
    def saturated(self) -> bool:
        return self.real["cpu"] > SATURATED

    def line(self) -> str:
        mark = " saturated" if self.saturated else ""
        measured = f"{self.predicted_s:7.3f} s {self.real['step_s']:7.3f} s {self.error:+6.1%} {self.spread:6.1%}"
        machine = f"{self.real['cpu']:4.0%}  {self.real['late']:4.0%}  {self.training:5.2f}x"
        return f"{self.name:38} {measured}  {machine}{mark}"


def measured(family: Family, setting: Setting, folder: Path, model: Path) -> dict[str, float]:
    """Seconds a step, for real."""
    shutil.rmtree(folder, ignore_errors=True)
    asyncio.run(controller.train(run_file(family, setting, folder, model), folder))
    ends = [event.t for event in read_events(folder / "events", StepDone)]
    found = measure(folder)
    token_s = sum(each.seconds for each in found.trainings) / sum(each.tokens for each in found.trainings)
    step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
    return {"step_s": step_s, "cpu": found.host.cpu, "late": found.host.late, "token_s": token_s}


def predicted(tree: dict[str, Any], setting: Setting, seeds: int) -> list[float]:
    """Seconds a step by seed, by simulation of the calibrated run file with other keys."""
    scenario = changed(tree, setting.keys | {"simulate.warmup": 1, "simulate.finite": True})
    scenario["training"]["steps"] = setting.steps
    for name, work in scenario["simulate"]["workloads"].items():
        scenario["simulate"]["workloads"][name] = _disturbed(Workload.model_validate(work), setting)
    if setting.crash or setting.hang:  # which the calibrated run had no need for
        scenario["environments"] |= EnvironmentsConfig().model_dump(include={"retries", "hedges"})
    valid = loading.validated(Tree(scenario), Scenario)
    return [simulate(valid, seed=seed).step_s for seed in range(seeds)]


def _disturbed(work: Workload, setting: Setting) -> dict[str, Any]:
    """Slower and failing environments."""
    update: dict[str, Any] = {}
    for key in ("reset", "step"):
        draw = draw_of(getattr(work, key))
        values = [setting.slower * draw((n + 0.5) / 1000) for n in range(1000)]
        parts = [MixturePart(share=1 - setting.hang, of=Distribution(values=values))]
        if setting.hang:
            parts.append(MixturePart(share=setting.hang, of=NEVER))
        update |= {key: Distribution(mixture=parts), f"{key}_failures": setting.crash}
    return work.model_copy(update=update).model_dump(mode="json", exclude_none=True)


def compare(name: str, family: Family, wanted: Collection[str], cells: Cells, seeds: int) -> Iterator[Prediction]:
    """The run that is calibrated on first, then the configurations that are `wanted`."""
    model = cells.folder / f"{name}-model"
    if not model.exists():
        make(family.model, model, seed=0)

    def real(setting: Setting, folder: Path) -> Any:
        return cells.get(
            lambda: measured(family, setting, folder, model),
            run=folder.name,
            delay=family.delay,
            setting=asdict(setting),
        )

    source = cells.folder / f"{name}-source"
    if (first := real(family.source, source)) is None:
        return
    calibration = calibrate(source)
    section = calibration.scenario.simulate
    print(f"{name}: {section.engines} train {section.train} contention {section.contention}", flush=True)
    settings = {key: setting for key, setting in family.settings.items() if key in wanted}
    foreseen = {key: predicted(calibration.tree, setting, seeds) for key, setting in settings.items()}
    yield Prediction(name, predicted(calibration.tree, family.source, seeds), first)
    for key, setting in settings.items():
        if (then := real(setting, cells.folder / f"{name}-{key}")) is not None:
            yield Prediction(f"{name}: {key}", foreseen[key], then, then["token_s"] / first["token_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="simulations of each configuration")
    parser.add_argument("--only", nargs="*", help="families, or configurations as it names them; default: all")
    parser.add_argument(
        "--stretch",
        type=float,
        default=1.0,
        help="environments and emulated devices slower by this, if others are busy",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    add_options(parser)
    options = parser.parse_args()
    families = FAMILIES
    if options.smoke:
        options.seeds, families = 1, _smoke()
    began = time.monotonic()
    own: list[Prediction] = []
    others: list[Prediction] = []
    print(f"{'':38} predicted measured   error spread   cpu  late training", flush=True)
    with kept_cells("predict", options) as cells:
        for name, ordinary in families.items():
            family, only = stretched(ordinary, options.stretch), options.only or families
            wanted = {key for key in family.settings if {name, f"{name}: {key}"} & set(only)}
            if not wanted or family.missing:
                continue
            for number, each in enumerate(compare(name, family, wanted, cells, options.seeds)):
                (others if number else own).append(each)
                print(each.line(), flush=True)
        missing = cells.missing
    print(json.dumps(_summary(own, others) | {"missing": missing, "seconds": round(time.monotonic() - began)}))


def _summary(own: list[Prediction], others: list[Prediction]) -> dict[str, Any]:
    errors = [abs(each.error) for each in others]
    return {
        "configurations": len(others),
        "median_error": round(median(errors), 3),
        "worst_error": round(max(errors), 3),
        "self_errors": {each.name: round(each.error, 3) for each in own},
        "errors": {each.name: round(each.error, 3) for each in others},
        "spread": {each.name: round(each.spread, 3) for each in own + others},
        "training": {each.name: round(each.training, 2) for each in others},
        "predicted_s": {each.name: round(each.predicted_s, 3) for each in others},
        "measured_s": {each.name: round(each.real["step_s"], 3) for each in others},
        "saturated": [each.name for each in own + others if each.saturated],
        "load": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
    }


def _smoke() -> dict[str, Family]:
    """One configuration each of an embedded engine and of agents on a fleet."""
    tiny = Setting(3, SMOKE)
    made = {}
    for name in ("embedded", "agents"):
        key, setting = next(iter(FAMILIES[name].settings.items()))
        settings = {key: replace(setting, steps=3, keys=setting.keys | SMOKE)}
        made[name] = replace(FAMILIES[name], delay=0.01, source=tiny, settings=settings)
    return made


if __name__ == "__main__":
    main()
