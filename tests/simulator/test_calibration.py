import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rollart.config import loading
from rollart.core.errors import RollartError
from rollart.core.event_log import EventLog
from rollart.core.events import EngineSample
from rollart.simulator.calibration import Calibration, calibrate, describe
from rollart.simulator.distributions import Distribution, mean_of
from rollart.simulator.fit import distance
from rollart.simulator.measurements import HostLoad, RunMeasurements
from rollart.simulator.scenario import Scenario, load
from rollart.simulator.simulation import simulate

_WORKLOAD = {
    "turns": {"mixture": [{"share": 0.5, "of": 2}, {"share": 0.5, "of": 6}]},
    "prompt": 40,
    "observation": 12,
    "response": {"uniform": [4, 12]},
    "reset": {
        "mixture": [
            {"share": 0.9, "of": {"lognormal": {"median": 0.5, "sigma": 0.2}}},
            {"share": 0.1, "of": {"uniform": [6, 8]}},
        ]
    },
    "step": {"lognormal": {"median": 0.3, "sigma": 0.6}},
    "reward": 0.05,
    "reset_failures": 0.03,
    "reward_failures": 0.05,
}


def _truth() -> Scenario:
    return Scenario.model_validate(
        {
            "name": "truth",
            "model": {"tiny": {"context": 512}},
            "tasks": [{"name": "play", "max_turns": 8, "max_context": 400, "sampling": {"max_tokens": 16}}],
            "environments": {"processes": 64, "retries": 0, "hedges": 0},
            "rewards": {"retries": 0},
            "training": {"steps": 12, "batch_groups": 8, "group_size": 4},
            "simulate": {
                "workloads": {"play": _WORKLOAD},
                "engines": {"engine": {"fixed": 0.006, "token": 0.0002}},
                "train": {"fixed": 0.2, "token": 0.0003},
                "links": {"quick": 1000.0},
                "weights": {"push": "quick", "pull": "quick"},
            },
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a simulated run, whose true values are known."""
    folder = tmp_path_factory.mktemp("truth")
    simulate(_truth(), folder=folder)
    (folder / "run.yaml").write_text(loading.dump(_truth()))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Calibration:
    return calibrate(folder)


def test_the_workload_is_recovered_from_its_log(found: Calibration) -> None:
    truth, work = _truth().workload("play"), found.scenario.workload("play")

    for key in ("turns", "prompt", "observation", "response", "reset", "step", "reward"):
        few = 0.2 if key == "reset" else 0.1  # one in ten takes ten times as long as the others
        assert mean_of(getattr(work, key)) == pytest.approx(mean_of(getattr(truth, key)), rel=few), key
    assert mean_of(work.delay) < 1e-6


def test_the_shape_of_each_distribution_is_recovered(found: Calibration) -> None:
    work = found.scenario.workload("play")

    assert isinstance(work.step, Distribution)
    assert work.step.lognormal is not None
    assert work.step.lognormal.sigma == pytest.approx(0.6, rel=0.1)
    assert isinstance(work.reset, Distribution)
    assert work.reset.mixture is not None
    assert work.reset.mixture[1].share == pytest.approx(0.1, abs=0.04)
    for data, fitted in found.fits("play").values():
        assert distance(fitted, data) < 0.1


def test_failures_are_counted_as_shares(found: Calibration) -> None:
    work = found.scenario.workload("play")

    assert work.reset_failures == pytest.approx(0.03, abs=0.025)
    assert work.reward_failures == pytest.approx(0.05, abs=0.03)
    assert work.step_failures == 0.0


def test_the_paces_of_engine_and_trainer_are_recovered(found: Calibration) -> None:
    section = found.scenario.simulate

    assert section.engines["engine"].fixed == pytest.approx(0.006, rel=0.15)
    assert section.train is not None
    assert section.train.fixed + section.train.token * 3000 == pytest.approx(0.2 + 0.0003 * 3000, rel=0.15)


def test_a_calibrated_scenario_takes_as_long_as_its_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "workload.yaml").write_text(calibrate(folder).text())

    again = simulate(load(tmp_path / "workload.yaml"))

    assert again.step_s == pytest.approx(simulate(_truth()).step_s, rel=0.15)


def test_emulated_engines_keep_the_pace_of_their_device(tmp_path: Path) -> None:
    pools = {
        "trainer": {"role": "train", "device": "cpu"},
        "h20": {"role": "generate", "device": "H20", "count": 2, "emulate": 1e5},
    }
    run = _truth().model_dump(mode="json") | {"pools": pools}
    run["simulate"]["engines"] = {}
    truth = Scenario.model_validate_json(json.dumps(run))
    simulate(truth, folder=tmp_path)
    (tmp_path / "run.yaml").write_text(loading.dump(truth))

    found = calibrate(tmp_path)

    assert found.scenario.simulate.engines == {}
    assert found.scenario.pools["h20"].device == "H20"
    assert simulate(found.scenario).step_s == pytest.approx(simulate(truth).step_s, rel=0.15)


def test_a_saturated_machine_and_late_engines_are_warned_about(found: Calibration) -> None:
    host = HostLoad(cores=2, samples=[1.0, 0.9])
    for seconds in (0.0, 10.0):
        counters = dict.fromkeys(("version", "running", "waiting", "kv_bytes", "prefilled", "generated"), 0)
        host.add(EngineSample(engine="e-0", busy_s=seconds, late_s=seconds / 5, **counters))
    busy = replace(found, measurements=RunMeasurements(host=host))

    saturated, late = busy.warnings

    assert "95% of its CPU seconds" in saturated
    assert "for 20% of their time" in late
    assert found.warnings == []


def test_a_run_that_has_not_trained_cannot_be_calibrated(tmp_path: Path) -> None:
    EventLog(tmp_path / "events", lambda: 0.0).close()

    with pytest.raises(RollartError, match="has not trained a step"):
        calibrate(tmp_path)


def test_the_error_for_a_folder_without_a_run_file_asks_for_one(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "events", tmp_path / "events")

    with pytest.raises(RollartError, match="--run-file"):
        calibrate(tmp_path)
    assert calibrate(tmp_path, folder / "run.yaml").scenario.name == "truth"


@pytest.mark.parametrize(
    ("fitted", "text"),
    [
        (2.5, "always 2.5"),
        ({"lognormal": {"median": 3.8, "sigma": 0.64}, "max": 51}, "log-normal, median 3.8, sigma 0.64, at most 51"),
        ({"mixture": [{"share": 0.98, "of": 20}, {"share": 0.02, "of": {"exponential": 400}}]}, "2.0% exponential"),
        ({"quantiles": [[0, 1], [0.5, 2], [1, 3]]}, "p50 2"),
    ],
)
def test_a_fit_is_described_in_a_few_words(fitted: object, text: str) -> None:
    assert text in describe(Distribution.model_validate(fitted) if isinstance(fitted, dict) else fitted)  # type: ignore[arg-type]
