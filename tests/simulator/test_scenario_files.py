"""Scenarios that ship are runs that could start: `rollart check` has room for their trainers and engines."""

from pathlib import Path

import pytest

from rollart.placement.workload import need_of
from rollart.simulator.scenario import load

_EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted([*(_EXAMPLES / "simulate").glob("*.yaml"), *(_EXAMPLES / "paper").glob("*.yaml")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_pool_fits_into_the_memory_of_its_devices(path: Path) -> None:
    scenario = load(path)
    classes = scenario.device_classes()
    for name, pool in scenario.pools.items():
        device = classes[pool.devices[0]]
        need = need_of(scenario, pool, scenario.shape, device)
        assert need.fits(device), f"{name}: {need.shortfall(device)}"
