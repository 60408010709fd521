"""The engine backends: one row each. An engine is added by its package and a row in `BACKENDS`.

Whatever the backend, the controller sees a service that speaks the methods of `EngineClient`; the backend may itself be
that service, or run one in front of a server of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.config import EngineConfig, PoolConfig, RunFile
from rollart.config.yaml_tree import KeyPath, did_you_mean
from rollart.core.errors import ConfigError
from rollart.engines.vllm import preflight as vllm
from rollart.hardware.roofline import ModelShape
from rollart.hardware.threads import thread_share, usable_cores

Problem = tuple[KeyPath, str]  # the key of the run file to change, and a sentence


def _no_problems(run: RunFile, pools: Mapping[str, PoolConfig]) -> Iterator[Problem]:
    yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """`python -m module` serves one engine; its spec is that of every engine, `config`, `classes` and what `spec` adds.

    `problems` checks the pools that start engines of this kind, before anything runs. `connects`: the `urls` of a pool
    are services of ours, to connect to; otherwise a service is launched in front of each.
    """

    name: str
    module: str
    spec: Callable[[RunFile, PoolConfig], dict[str, Any]] = lambda run, pool: {}
    problems: Callable[[RunFile, Mapping[str, PoolConfig]], Iterator[Problem]] = _no_problems
    start_deadline: Callable[[RunFile], float] = lambda run: run.engine.start_deadline
    emulated: bool = False
    tensor_parallel: bool = False
    connects: bool = False


BACKENDS: dict[str, Backend] = {
    row.name: row
    for row in (
        Backend(name="torch", module="rollart.engines.torch.service", emulated=True, connects=True),
        Backend(
            name="vllm",
            module="rollart.engines.vllm.service",
            spec=vllm.service_spec,
            problems=vllm.problems,
            start_deadline=lambda run: run.engine.start_deadline + run.vllm.start_deadline,
            tensor_parallel=True,
        ),
    )
}


def backend_of(pool: PoolConfig) -> Backend:
    """Raises ConfigError."""
    if pool.engine not in BACKENDS:
        raise ConfigError(f"no engine is called {pool.engine!r}{did_you_mean(pool.engine, list(BACKENDS))}")
    return BACKENDS[pool.engine]


def with_tensor_parallel(devices: int) -> str:
    """The name of the first backend whose engines span `devices`."""
    return next(name for name, backend in BACKENDS.items() if devices == 1 or backend.tensor_parallel)


def start_deadline(run: RunFile) -> float:
    """The longest that an engine may take to start."""
    return max(backend_of(pool).start_deadline(run) for pool in run.pools_of("generate").values())


def unsupported(run: RunFile) -> Iterator[Problem]:
    """What the pools ask of their backends that these cannot do."""
    parallel = " or ".join(name for name, backend in BACKENDS.items() if backend.tensor_parallel)
    for name, pool in run.pools.items():
        backend, where = BACKENDS.get(pool.engine), f"pools.{name}"
        if backend is None:
            known = " or ".join(map(repr, BACKENDS))
            hint = did_you_mean(pool.engine, list(BACKENDS))
            yield ("pools", name, "engine"), f"{where}.engine must be {known}, not {pool.engine!r}{hint}"
        elif pool.tensor_parallel > 1 and not backend.tensor_parallel:
            wrong = f"`tensor_parallel` needs engine: {parallel}; a {pool.engine} engine runs on one device"
            yield ("pools", name, "engine"), f"{where}: {wrong}"
        elif pool.emulate and not backend.emulated:
            wrong = f"a {pool.engine} engine cannot be paced; leave out `engine` or `emulate`"
            yield ("pools", name, "emulate"), f"{where}: {wrong}"


def problems(run: RunFile, *, here: bool = True) -> Iterator[Problem]:
    """Why the engines of a run cannot start, as far as this machine shows before they do; unless they start `here`,
    only what holds on any machine."""
    wrong = list(unsupported(run))
    yield from wrong
    for backend in () if wrong or not here else BACKENDS.values():
        pools = {name: pool for name, pool in run.pools.items() if pool.engine == backend.name and not pool.urls}
        yield from backend.problems(run, pools)


def alone(config: EngineConfig, model: Path) -> EngineConfig:
    """The settings of an engine that has this machine to itself."""
    threads = config.threads or thread_share(usable_cores(), 1, ModelShape.of_folder(model).parameters)
    return config.model_copy(update={"threads": threads})
