"""A coarse copy of the simulator in C++, two hundred times as fast, for fits that need thousands of simulations.

`simulate` takes a scenario like those of examples/paper and returns what their figures need. Its step times are within
a tenth of the simulator's (tests/simulator/test_surrogate.py); what it leaves out is in surrogate.cpp.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from rollart.core.errors import RollartError
from rollart.hardware.roofline import Roofline
from rollart.hardware.training_time import StepPasses, step_seconds
from rollart.placement.workload import training_setup
from rollart.simulator.distributions import Distribution, Quantity, draw_of
from rollart.simulator.pass_cost import PassCost
from rollart.simulator.scenario import Scenario, ScenarioTask, Workload, engine_defaults
from rollart.simulator.services import training_seconds
from rollart.simulator.weight_transfer import WeightTransfer

SOURCES = [Path(__file__).with_name(name) for name in ("surrogate.h", "surrogate.cpp", "surrogate_engine.cpp")]
PRESETS = ("sync", "sync_plus", "one_off", "start_bound", "rollart")
PARTS = ("generate", "train", "reset", "step", "reward", "weights")
COMPILE_S = 120
_POINTS = 1024  # of a quantile function
_MANY = 10**9  # tokens, for which a pass does nothing but compute
_LONG = 1e12  # tokens, for which attention takes all of the time to compute


@dataclass(frozen=True, slots=True)
class SurrogateResult:
    """As those of a SimulationResult; `busy` are shares of time by pool."""

    step_s: float
    tokens_per_s: float
    train_s: float
    exposed: dict[str, float]
    busy: tuple[float, ...]

    @property
    def wait_s(self) -> float:
        return self.step_s - self.train_s


def simulate(scenario: Scenario) -> SurrogateResult:
    """Raises RollartError if there is no C++ compiler."""
    numbers = np.array([*_settings(scenario), *_engines(scenario), *_tasks(scenario)])
    pools = len(scenario.pools_of("generate"))
    out = np.zeros(3 + len(PARTS) + pools)
    doubles = ctypes.POINTER(ctypes.c_double)
    _library().run_surrogate(numbers.ctypes.data_as(doubles), out.ctypes.data_as(doubles))
    step_s, tokens_per_s, train_s, *others = out.tolist()
    exposed, busy = others[: len(PARTS)], others[len(PARTS) :]
    return SurrogateResult(step_s, tokens_per_s, train_s, dict(zip(PARTS, exposed, strict=True)), tuple(busy))


def available() -> bool:
    return shutil.which(os.environ.get("CXX", "c++")) is not None


@cache
def _library() -> ctypes.CDLL:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise RollartError("the surrogate needs a C++ compiler; install one, or name it in CXX")
    key = blake2b(b"".join(source.read_bytes() for source in SOURCES), digest_size=8).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollart"
    target = folder / f"surrogate-{key}.so"
    if not target.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = target.with_suffix(f".{os.getpid()}")
        flags = ("-std=c++17", "-O2", "-shared", "-fPIC")
        subprocess.run([compiler, *flags, "-o", str(draft), *map(str, SOURCES[1:])], check=True, timeout=COMPILE_S)
        draft.replace(target)
    return ctypes.CDLL(str(target))


def _settings(scenario: Scenario) -> Iterator[float]:
    part, section, schedule = scenario.thinned(), scenario.simulate, scenario.schedule
    weights, rollout = WeightTransfer.of(scenario), scenario.rollout
    yield PRESETS.index(rollout.preset)
    yield schedule.alpha
    yield from (part.training.batch_groups, part.training.group_size, schedule.extra_members)
    yield from (part.environments.processes, part.training.steps, scenario.warmup)
    yield part.simulate.scoring.concurrency
    yield from (weights.exposed_s, weights.push_s, weights.pull_s, float(section.weights.method == "collective"))
    yield float(section.bound == "served" and section.weights.install_first)
    yield section.one_in
    yield from _training(scenario)
    yield from (scenario.seed, 1.0 if section.colocated else 0.0)


def _training(scenario: Scenario) -> tuple[float, float, float, float]:
    """Seconds to compute by token and by squared length, to gather weights by token, and fixed ones."""
    (pool,) = scenario.pools_of("train").values()
    device = scenario.device_classes()[pool.devices[0]]
    fixed = training_seconds(scenario, device, pool.count)([])
    if (pace := scenario.simulate.train) is not None:
        return pace.token, 0.0, 0.0, pace.fixed
    setup = training_setup(scenario, device, pool.count)
    seconds = partial(
        step_seconds,
        shape=scenario.shape,
        setup=setup,
        device=device,
        passes=StepPasses(float(scenario.training.epochs), 1 - 1 / scenario.training.updates),
    )
    efficiency = scenario.simulate.constants.train_efficiency
    slow, fast = 1e-9, 1e9  # so that computing decides, or gathering
    token = seconds([1.0], efficiency=slow) * slow / efficiency
    square = seconds([_LONG], efficiency=slow) * slow / efficiency / _LONG**2
    return token, square, seconds([_LONG], efficiency=fast) / _LONG, fixed


def _engines(scenario: Scenario) -> Iterator[float]:
    """Those that prefill best first: tags are given to pools by their place."""
    pools, part, constants = _pools(scenario), scenario.thinned(), scenario.simulate.constants
    efficiency = constants.memory_efficiency
    yield len(pools)
    for name in pools:
        pool = part.pools_of("generate")[name]
        device, shape = scenario.device_classes()[pool.devices[0]], scenario.shape
        cost = PassCost(Roofline(device, shape, 1.0, pool.tensor_parallel), None, constants)
        memory = device.memory * 1e9 * pool.tensor_parallel * constants.kv_memory
        defaults = engine_defaults(device.name)
        yield pool.workers
        yield from _costs(cost, shape.weight_bytes(1) / (device.bandwidth * 1e9 * pool.tensor_parallel * efficiency))
        yield (memory - shape.parameters * shape.number_bytes) // shape.kv_bytes
        yield part.engine.max_batch or defaults["max_batch"]
        yield part.engine.prefill_chunk or defaults["prefill_chunk"]


def _costs(cost: PassCost, weights: float) -> tuple[float, ...]:
    """Seconds of a pass, of reading the weights and the KV of a token, to compute a token and an attention, of the host
    for a sequence, and of all-reduces for a token."""
    one = partial(cost.mixed, kv=0.0, passes=1.0, batch=0, context=0.0)
    (idle, kv), (single, _) = cost.decode(0, 0.0), cost.decode(1, 0.0)
    fixed = idle - weights
    sequence = one(tokens=0, attended=0.0, prompts=1) - one(tokens=0, attended=0.0, prompts=0)
    reduce = single - idle - sequence
    token = (one(tokens=_MANY, attended=0.0, prompts=0) - fixed) / _MANY - reduce
    attend = (one(tokens=0, attended=float(_MANY) ** 2, prompts=0) - fixed) / float(_MANY) ** 2
    return fixed, weights, kv, token, attend, sequence, reduce


def _pools(scenario: Scenario) -> list[str]:
    pools = scenario.pools_of("generate")
    devices = {name: scenario.device_classes()[pool.devices[0]] for name, pool in pools.items()}
    return sorted(pools, key=lambda name: devices[name].bandwidth / devices[name].tflops)


def _tasks(scenario: Scenario) -> Iterator[float]:
    yield len(scenario.tasks)
    for task in scenario.tasks:
        workload = scenario.workload(task.name)
        yield from _limits(task, workload)
        for name in ("turns", "prompt", "observation", "response", "reset", "step", "reward"):
            quantiles = _quantiles(getattr(workload, name))
            yield len(quantiles)
            yield from quantiles


def _limits(task: ScenarioTask, workload: Workload) -> tuple[float, ...]:
    pool = 1.0 if task.affinity == "decode" else 0.0
    return workload.window or 0.0, pool, task.sampling.max_tokens, task.max_turns, task.max_context


def _quantiles(quantity: Quantity) -> tuple[float, ...]:
    if isinstance(quantity, int | float):
        return (float(quantity),)
    return _drawn(quantity.model_dump_json())


@cache
def _drawn(quantity: str) -> tuple[float, ...]:
    draw = draw_of(Distribution.model_validate_json(quantity))
    return tuple(draw((number + 0.5) / _POINTS) for number in range(_POINTS))
