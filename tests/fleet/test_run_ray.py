"""A whole run on a Ray cluster of several nodes, which are killed and replaced under it."""

from pathlib import Path

import pytest

pytest.importorskip("ray")
from benchmarks.ray_faults import ROLES, faults

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
def test_a_run_survives_the_nodes_of_its_engines_environments_and_trainer(tmp_path: Path) -> None:
    result = faults(steps=100, scratch=tmp_path)
    assert set(result["recovery_s"]) == set(ROLES)
    assert result["finished"]
    assert (result["lost_trajectories"], result["trained_twice"]) == (0, 0)
