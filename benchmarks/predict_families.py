"""The runs of `benchmarks/predict.py`: for each family a run to calibrate on, and configurations that change its keys.

Environments and engines are slow enough that the cores of a small machine have little to do, and runs have as many
steps as fit into about half a minute: the fewer, the more their mean varies. Those that are calibrated on have more,
as all predictions of their family depend on them.
"""

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollart.config import RunFile, TinyModelConfig

MEAN_STEP_S = 4.7  # of the paper's distribution of environment steps
SLOWDOWN = 90_000.0  # of emulated devices: a pass takes tens of milliseconds
VLLM = "ROLLART_VLLM_PYTHON"
SMALL_KV = TinyModelConfig(hidden=96, layers=2, heads=6, kv_heads=1, context=1024)  # next to its weights
LARGE_HEADS = TinyModelConfig(hidden=96, layers=3, heads=3, kv_heads=1, context=1024)  # the least that vLLM knows


@dataclass(frozen=True, slots=True)
class Setting:
    """`keys` of the run file that differ from the run that is calibrated on, by their dotted names; None removes one.
    Environments are `slower` by a factor, and crash or hang with a probability per call."""

    steps: int
    keys: dict[str, Any] = field(default_factory=dict)
    slower: float = 1.0
    crash: float = 0.0
    hang: float = 0.0


@dataclass(frozen=True, slots=True)
class Family:
    """`run` is the run file that is calibrated on, without its model; `delay` is the mean of an environment step, in
    seconds."""

    run: dict[str, Any]
    delay: float
    source: Setting
    settings: dict[str, Setting]
    model: TinyModelConfig = SMALL_KV
    needs: str = ""  # an environment variable

    @property
    def missing(self) -> bool:
        return bool(self.needs) and self.needs not in os.environ


def run_file(family: Family, setting: Setting, folder: Path, model: Path) -> RunFile:
    run = changed(family.run, setting.keys | {"model.path": str(model), "output": str(folder)})
    run["training"]["steps"] = setting.steps
    for task in run["tasks"]:
        task["args"] = task["args"] | {"delay": setting.slower * family.delay / MEAN_STEP_S}
        if setting.crash or setting.hang:
            task["args"] |= {"crash": setting.crash, "hang": setting.hang}
    return RunFile.model_validate(run)


def stretched(family: Family, factor: float) -> Family:
    """With environments and emulated devices slower by `factor`."""

    def slower(pools: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: pool | {"emulate": factor * pool["emulate"]} if "emulate" in pool else pool
            for name, pool in pools.items()
        }

    def keys(of: Mapping[str, Any]) -> dict[str, Any]:
        seconds = {key: factor * value for key, value in of.items() if key.endswith("_deadline")}
        return dict(of) | seconds | {key: slower(value) for key, value in of.items() if key == "pools"}

    settings = {name: replace(each, keys=keys(each.keys)) for name, each in family.settings.items()}
    run = family.run | {"pools": slower(family.run.get("pools", {}))}
    return replace(family, run=run, delay=factor * family.delay, settings=settings)


def changed(tree: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with `keys` set, or removed."""
    copied = copy.deepcopy(dict(tree))
    for key, value in keys.items():
        *sections, last = key.split(".")
        inner = copied
        for section in sections:
            inner = inner.setdefault(section, {})
        if value is None:
            inner.pop(last, None)
        else:
            inner[last] = value
    return copied


def _base(tasks: list[dict[str, Any]], **sections: Any) -> dict[str, Any]:
    return {
        "name": "predict",
        "tasks": tasks,
        "rollout": {"preset": "rollart", "alpha": 1},
        "environments": {"processes": 48},
        "training": {"batch_groups": 8, "group_size": 4, "lr": 1e-7},
        "evaluation": {"every": 0, "episodes": 1, "final_episodes": 1},
        "checkpoint": {"every": 1000},
        **sections,
    }


def _task(name: str, turns: int, read: int, write: int) -> dict[str, Any]:
    return {
        "name": name,
        "env": "benchmarks.paced:Ordinary",
        "args": {"env": "benchmarks.paced:Shaped", "args": {"turns": turns, "characters": read}},
        "max_turns": turns,
        "max_context": turns * (read + write + 4) + 16,
        "sampling": {"max_tokens": write},
    }


def _agent(name: str, turns: int, read: int, write: int) -> dict[str, Any]:
    task = _task(name, turns, read, write)
    del task["env"]
    return task | {"agent": "benchmarks.paced:agent", "args": {"turns": turns, "characters": read}}


def _pools(**engines: dict[str, Any]) -> dict[str, Any]:
    trainer = {"role": "train", "device": "cpu", "count": 1}
    return {"trainer": trainer} | {name: {"role": "generate"} | pool for name, pool in engines.items()}


def _devices(h800: int, h20: int) -> dict[str, Any]:
    pools = {"compute": ("H800", h800), "bandwidth": ("H20", h20)}
    return _pools(
        **{name: {"device": device, "count": n, "emulate": SLOWDOWN} for name, (device, n) in pools.items() if n}
    )


READER, WRITER = ("reader", 4, 80, 6), ("writer", 1, 16, 48)
EMBEDDED = Family(
    _base([_task("talker", 6, 24, 6), _task("writer", 2, 16, 16)]),
    delay=0.15,
    source=Setting(32),
    settings={
        "sync": Setting(8, {"rollout": {"preset": "sync"}}),
        "sync_plus": Setting(12, {"rollout": {"preset": "sync_plus"}}),
        "one_off": Setting(12, {"rollout": {"preset": "one_off"}}),
        "two engines": Setting(24, {"engine.count": 2}),
        "8 processes a task": Setting(10, {"environments.processes": 8}),
    },
)
FLEET = Family(
    _base([_task(*READER), _task(*WRITER)], pools=_devices(1, 2)),
    delay=0.15,
    source=Setting(24),
    settings={
        "2 H800": Setting(16, {"pools": _devices(2, 0)}),
        "4 H20": Setting(14, {"pools": _devices(0, 4)}),
        "2 H800 and 2 H20": Setting(18, {"pools": _devices(2, 2)}),
        "prefill on H800, decode on H20": Setting(14, {"routing.disaggregate": ["compute", "bandwidth"]}),
        "alpha 0": Setting(9, {"rollout.alpha": 0}),
        "alpha 2": Setting(22, {"rollout.alpha": 2}),
        "alpha 4": Setting(24, {"rollout.alpha": 4}),
        "one extra member": Setting(18, {"rollout.extra_members": 1}),
        "16 groups": Setting(10, {"training.batch_groups": 16}),
        "environments 2x slower": Setting(11, slower=2.0),
        "environments crash": Setting(14, crash=0.03),
        "environments hang": Setting(
            10, {"environments.step_deadline": 2.0, "environments.reset_deadline": 6.0}, hang=0.02
        ),
    },
)
AGENTS = Family(
    _base([_agent(*READER)], pools=_devices(1, 1)) | {"environments": {"processes": 64}},
    delay=0.15,
    source=Setting(24),
    settings={
        "alpha 0": Setting(12, {"rollout.alpha": 0}),
        "3 H800": Setting(18, {"pools": _devices(3, 0)}),
        "16 processes": Setting(12, {"environments.processes": 16}),
    },
)
VLLM_CPU = replace(
    EMBEDDED,
    run=EMBEDDED.run | {"pools": _pools(policy={"device": "cpu", "engine": "vllm"})},
    delay=1.0,
    source=Setting(8),
    settings={
        "alpha 0": Setting(6, {"rollout.alpha": 0}),
        "16 groups": Setting(6, {"training.batch_groups": 16}),
    },
    model=LARGE_HEADS,
    needs=VLLM,
)
FAMILIES = {"embedded": EMBEDDED, "fleet": FLEET, "agents": AGENTS, "vllm": VLLM_CPU}
