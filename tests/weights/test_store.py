from pathlib import Path

import pytest
import torch

from rollart.errors import RollartError
from rollart.weights.store import MissingVersion, WeightStore


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), value), "b": torch.arange(5)}


def test_a_published_version_loads_as_it_was(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    store.publish(3, tensors(1.5))
    loaded = WeightStore(tmp_path / "store").load(3)
    assert loaded.keys() == {"a", "b"}
    assert torch.equal(loaded["a"], torch.full((3, 4), 1.5))
    assert torch.equal(loaded["b"], torch.arange(5))


def test_tied_weights_are_stored_once_and_loaded_under_both_names(tmp_path: Path) -> None:
    shared = torch.randn(1000, 8)
    store = WeightStore(tmp_path)
    store.publish(0, {"embed": shared, "head": shared})
    loaded = store.load(0)
    assert torch.equal(loaded["head"], shared)
    assert loaded["head"].data_ptr() == loaded["embed"].data_ptr()
    assert next(tmp_path.iterdir()).stat().st_size < 1.1 * shared.nbytes


def test_latest_is_the_highest_version_and_none_in_an_empty_store(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    assert store.latest() is None
    for version in (9, 10, 2):
        store.publish(version, tensors(version))
    assert store.latest() == 10


def test_a_missing_version_names_what_there_is(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.publish(1, tensors(1))
    with pytest.raises(MissingVersion, match=r"version 7 is not in the weight store .*\[1\]"):
        store.load(7)


def test_retire_leaves_the_kept_and_the_newer(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    for version in range(5):
        store.publish(version, tensors(version))
    assert store.retire(keep={1, 3}) == [0, 2]
    assert store.versions() == [1, 3, 4]


def test_a_reader_keeps_its_tensors_when_the_version_is_retired(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.publish(0, tensors(7))
    loaded = store.load(0)
    store.publish(1, tensors(8))
    store.retire(keep={1})
    assert loaded["a"].sum().item() == 7 * 12


def test_writing_to_a_loaded_tensor_does_not_change_the_store(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.publish(0, tensors(7))
    store.load(0)["a"].zero_()
    assert store.load(0)["a"].sum().item() == 7 * 12


def test_a_half_written_version_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore(tmp_path)

    def full_disk(*_: object, **__: object) -> None:
        (tmp_path / "0").touch()
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(RollartError, match=r"version 4 could not be written .* no space left"):
        store.publish(4, tensors(1))
    assert store.versions() == []


def test_the_shared_store_is_found_by_name_and_removed_by_close() -> None:
    store = WeightStore.shared("test-store")
    try:
        store.publish(2, tensors(1))
        assert WeightStore.shared("test-store").latest() == 2
    finally:
        store.close()
    assert not store.root.exists()
