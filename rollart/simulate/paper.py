"""The scenarios of the RollArt paper, and what a published figure is compared by.

All scenarios share the constants of `rollart.simulate.constants`; nothing is fitted per figure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rollart.core.errors import RollartError
from rollart.simulate.result import Result
from rollart.simulate.scenario import Scenario, load
from rollart.simulate.simulation import simulate

CLOSE = 0.15
FOLDER = Path(__file__).parents[2] / "examples" / "paper"
GPUS = {"qwen3-8b": 1, "qwen3-14b": 2, "qwen3-32b": 4}  # devices of one engine


@dataclass(frozen=True, slots=True)
class Row:
    """`reason`: why the published value cannot follow from what the paper states."""

    figure: str
    what: str
    published: float
    simulated: float
    reason: str = ""

    @property
    def error(self) -> float:
        return self.simulated / self.published - 1

    @property
    def close(self) -> bool:
        return abs(self.error) <= CLOSE


class Scenarios:
    """Runs each variant once. `told` hears of every simulation."""

    def __init__(self, folder: Path, told: Callable[[str], None]) -> None:
        if not (folder / "end_to_end.yaml").is_file():
            raise RollartError(f"{folder} has no scenarios of the paper; say where they are with --scenarios")
        self._folder, self._told = folder, told
        self.run = cache(self._run)

    def load(self, name: str, *overrides: str) -> Scenario:
        return load(self._folder / f"{name}.yaml", overrides)

    def _run(self, name: str, *overrides: str, preset: str = "") -> Result:
        self._told(" ".join((name, preset, *overrides)))
        scenario = self.load(name, *overrides)
        return simulate(scenario.with_preset(preset) if preset else scenario)

    def end_to_end(self, model: str, preset: str, *more: str) -> Result:
        """The paper's main comparison: RollArt on two classes, its baselines on 128 H800 in one cluster.

        All train on 32 devices, Sync and Sync+ too, of which the paper does not say it. Did they take turns on all 128,
        its numbers would exclude each other: One-off is 1.31 to 1.41 times as fast as Sync+, so at least 24% of a Sync+
        step is not rollout; on a quarter of the devices that is 95% of a Sync+ step, and RollArt, which trains on 32,
        could be 1.06 times as fast as Sync+, not 1.72 to 1.91."""
        each = GPUS[model]
        given = [f"model.name={model}"]
        if preset == "rollart":
            pools = f"h800: {_engines('H800', 64, each)}, h20: {_engines('H20', 32, each)}"
        else:
            pools = f"rollout: {_engines('H800', 96, each)}"
            given.append("simulate.weights={method: collective, push: infiniband}")
        given.append(f"pools={{trainer: {{role: train, device: H800, count: 32}}, {pools}}}")
        if preset == "sync":
            given.append("simulate.scoring={where: dedicated, concurrency: 32}")
        name = "end_to_end" if model == "qwen3-32b" else "end_to_end_small"
        return self.run(name, *given, *more, preset=preset)


def _engines(device: str, devices: int, each: int) -> str:
    return f"{{role: generate, device: {device}, count: {devices // each}, engine: vllm, tensor_parallel: {each}}}"
