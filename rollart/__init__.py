"""rollart trains LLM agents with reinforcement learning on mixed hardware.

>>> import rollart
>>> run = rollart.train("examples/quickstart.yaml")  # doctest: +SKIP
>>> run.summary()["tasks"]["frozen_lake"]["after"]  # doctest: +SKIP
0.97

Importing the package imports only this file: hosts of environments and rewards run in Pythons that have nothing but the
standard library. The functions are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollart.app.api import Evaluation, TaskScore, evaluate, load_run, load_scenario, sample, simulate, train
    from rollart.app.run_reader import Records, RunFolder
    from rollart.core.errors import ConfigError, RollartError

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "Evaluation",
    "Records",
    "RollartError",
    "RunFolder",
    "TaskScore",
    "__version__",
    "evaluate",
    "load_run",
    "load_scenario",
    "sample",
    "simulate",
    "train",
]

_HOMES = {"ConfigError": "core.errors", "RollartError": "core.errors"} | dict.fromkeys(
    ("Records", "RunFolder"), "app.run_reader"
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rollart' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rollart.{_HOMES.get(name, 'app.api')}"), name)


def __dir__() -> list[str]:
    return __all__
