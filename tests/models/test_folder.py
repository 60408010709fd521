from pathlib import Path

import pytest

from rollart.models.folder import atomic_folder, is_model


def test_a_folder_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "model"
    with atomic_folder(path) as draft:
        (draft / "a").write_text("1")
        assert not path.exists()
    assert (path / "a").read_text() == "1"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "a").write_text("old")
    with pytest.raises(RuntimeError), atomic_folder(path) as draft:
        (draft / "a").write_text("new")
        raise RuntimeError
    assert (path / "a").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_folder_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "old").touch()
    with atomic_folder(path) as draft:
        (draft / "new").touch()
    assert [file.name for file in path.iterdir()] == ["new"]


def test_a_model_needs_weights_config_and_tokenizer(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        assert not is_model(tmp_path)
        (tmp_path / name).touch()
    assert is_model(tmp_path)
