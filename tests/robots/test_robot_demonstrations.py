"""Demonstration files: what is read, and one sentence for what cannot be used."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from rollart.config.robots import ControlConfig
from rollart.robots.chunks import ImitationData, Scaling
from rollart.robots.demonstrations import Demonstration, DemonstrationError, load, load_for, save


def episode(length: int, start: float = 0.0) -> Demonstration:
    times = np.arange(length, dtype=np.float32) + start
    return Demonstration(np.stack([times, -times, np.ones_like(times)], 1), np.stack([times / 10, times], 1))


def written(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


GOOD = {"observations": np.zeros((5, 3)), "actions": np.zeros((5, 2))}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / "demos.npz", [episode(4), episode(6, 10.0)])
    first, second = load(tmp_path / "demos.npz", 2)
    assert np.array_equal(second.observations, episode(6, 10.0).observations)
    assert len(first.actions) == 4


def test_a_folder_gives_its_files_in_order_and_no_more_than_asked_for(tmp_path: Path) -> None:
    save(tmp_path / "b.npz", [episode(3)])
    save(tmp_path / "a.npz", [episode(7), episode(8)])
    assert [len(one.actions) for one in load(tmp_path, 2)] == [7, 8]


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"observations": np.zeros((5, 3))}, "has no array `actions`; it has observations"),
        ({**GOOD, "actions": np.zeros((4, 2))}, "`lengths` must be whole numbers that add up"),
        ({**GOOD, "lengths": np.array([2, 2])}, "`lengths` must be whole numbers that add up"),
        ({**GOOD, "lengths": np.array([5, 0])}, "`lengths` must be whole numbers that add up"),
        ({**GOOD, "actions": np.zeros(5)}, "expected numbers [time, size]"),
        ({**GOOD, "observations": np.zeros(15)}, "`observations` is float64 (15,); expected numbers [time, size]"),
        ({**GOOD, "actions": np.full((5, 2), np.nan)}, "episode 0: `actions` has values that are not finite, first at"),
        ({**GOOD, "observations": np.full((5, 3), "x")}, "expected numbers [time, size]"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, arrays: dict[str, Any], problem: str) -> None:
    with pytest.raises(DemonstrationError) as error:
        load(written(tmp_path / "bad.npz", **arrays), 1)
    assert problem in str(error.value) and "bad.npz" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_npz_a_missing_one_and_too_few_episodes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(DemonstrationError, match=r"is not an npz file"):
        load(tmp_path / "text.npz", 1)
    with pytest.raises(DemonstrationError, match="does not exist"):
        load(tmp_path / "missing.npz", 1)
    save(tmp_path / "one.npz", [episode(3)])
    with pytest.raises(DemonstrationError, match="have 1 episodes, fewer than the 2 asked for"):
        load(tmp_path / "one.npz", 2)


def test_demonstrations_of_another_task_are_refused_before_training(tmp_path: Path) -> None:
    file = written(tmp_path / "b.npz", observations=np.zeros((5, 39)), actions=np.zeros((5, 4)))
    assert len(load_for("metaworld:reach-v3", file, 1)) == 1
    with pytest.raises(DemonstrationError, match="observations of 39 and actions of 4 numbers, but adroit:door has"):
        load_for("adroit:door", file, 1)
    with pytest.raises(DemonstrationError, match="reach-v3 has observations of 391 and actions of 4 numbers"):
        load_for("metaworld:reach-v3", file, 1, points=128)


def test_episodes_of_different_sizes_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.npz", [episode(3)])
    written(tmp_path / "b.npz", observations=np.zeros((5, 4)), actions=np.zeros((5, 2)))
    with pytest.raises(DemonstrationError, match=r"episode 1 has sizes \(4, 2\), the first \(3, 2\)"):
        load(tmp_path, 2)


def test_minari_and_d4rl_files_are_read(tmp_path: Path) -> None:
    one, two = episode(4), episode(6, 10.0)
    with h5py.File(tmp_path / "minari.hdf5", "w") as file:
        for number, demo in enumerate((one, two)):
            group = file.create_group(f"episode_{number}")
            group["observations"] = np.concatenate([demo.observations, demo.observations[-1:]])
            group["actions"] = demo.actions
    with h5py.File(tmp_path / "d4rl.hdf5", "w") as file:
        file["observations"] = np.concatenate([one.observations, two.observations])
        file["actions"] = np.concatenate([one.actions, two.actions])
        file["terminals"] = np.arange(10) == 3
        file["timeouts"] = np.arange(10) == 9
    for name in ("minari.hdf5", "d4rl.hdf5"):
        assert [len(found.actions) for found in load(tmp_path / name, 2)] == [4, 6]


def test_the_folder_of_a_minari_data_set_is_read() -> None:
    """Written by minari 0.5.4: three episodes of 4, 6 and 5 steps, with infos and the last observation."""
    found = load(Path(__file__).parent / "minari" / "line-v0", 3)
    assert [len(one.actions) for one in found] == [4, 6, 5]
    assert found[1].observations[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert found[1].actions[2].tolist() == pytest.approx([0.6, 0.2])


def test_windows_repeat_the_first_observation_and_the_last_action() -> None:
    control = ControlConfig(history=2, chunk=3, execute=1)
    data = ImitationData.of([episode(4)], control)
    scaling = data.scaling
    assert data.conditions.shape == (4, 6) and data.chunks.shape == (4, 6)
    assert torch.equal(data.conditions[0, :3], data.conditions[0, 3:])
    assert torch.equal(data.conditions[2, :3], data.conditions[1, 3:])
    last = scaling.commands(data.chunks.reshape(4, 3, 2))[3]
    assert torch.allclose(last, torch.tensor([[0.3, 3.0]]).expand(3, 2))


def test_scaling_maps_to_one_and_back_and_ignores_what_is_constant() -> None:
    scaling = Scaling.fit([episode(11)])
    seen = scaling.observations(torch.from_numpy(episode(11).observations))
    assert (seen[:, :2].amin().item(), seen[:, :2].amax().item()) == pytest.approx((-1, 1))
    assert (seen[:, 2] == 0).all(), "a constant observation carries nothing"
    actions = torch.tensor([[0.5, 7.0]])
    assert torch.allclose(scaling.commands(scaling.actions(actions)), actions, atol=1e-6)
    assert scaling.observations(torch.tensor([[1e6, 0.0, 5.0]]))[0].tolist() == pytest.approx([3.0, 1.0, 0.0])
