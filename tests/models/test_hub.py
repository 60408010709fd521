"""Models and datasets of the hub are found in its cache layout, and every way to miss them is one sentence."""

from pathlib import Path

import pytest

from rollart.core.errors import ConfigError
from rollart.models import hub

COMMIT = "a" * 40


def lay_out(cache: Path, kind: str, id: str, files: dict[str, str], ref: str = "main") -> Path:
    """A repository as huggingface_hub leaves it in its cache."""
    root = cache / f"{kind}s--{id.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    for name, text in files.items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_text(text)
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / ref).write_text(COMMIT)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_cached_model_is_its_snapshot(cache: Path) -> None:
    made = lay_out(cache, "model", "Own/Tiny-1B", {"config.json": "{}", "model.safetensors": "x"})
    assert hub.model_folder("Own/Tiny-1B", None, weights=True) == made


def test_a_revision_is_looked_up(cache: Path) -> None:
    made = lay_out(cache, "model", "Own/Tiny-1B", {"config.json": "{}", "model.safetensors": "x"}, ref="v2")
    assert hub.model_folder("Own/Tiny-1B", "v2", weights=True) == made
    with pytest.raises(ConfigError, match=r"at revision v3 .* nor in the cache"):
        hub.model_folder("Own/Tiny-1B", "v3", weights=True)


def test_a_description_without_weights_is_enough_to_check_but_not_to_train(cache: Path) -> None:
    lay_out(cache, "model", "Own/Tiny-1B", {"config.json": "{}"})
    hub.model_folder("Own/Tiny-1B", None, weights=False)
    with pytest.raises(ConfigError, match="not its safetensors"):
        hub.model_folder("Own/Tiny-1B", None, weights=True)


def test_a_model_that_is_nowhere_is_one_sentence(cache: Path) -> None:
    with pytest.raises(ConfigError, match="cannot get Own/Gone from the Hugging Face hub: it is neither a folder"):
        hub.model_folder("Own/Gone", None, weights=True)


@pytest.mark.parametrize("id", ["models/smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_the_model_that_a_wheel_contains_comes_with_the_command_that_makes_it(cache: Path, id: str) -> None:
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set; `rollart models smollm2 models/smollm2-135m` makes"):
        hub.model_folder(id, None, weights=True)


def test_the_files_of_a_split_are_found_in_order(cache: Path) -> None:
    files = dict.fromkeys(("main/train-00001-of-00002.parquet", "main/train-00000-of-00002.parquet"), "")
    lay_out(cache, "dataset", "own/sums", {**files, "main/test-00000-of-00001.parquet": "", "extra/train.jsonl": ""})
    found = hub.dataset_files("own/sums", None, "main", "train")
    assert [file.name for file in found] == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    with pytest.raises(ConfigError, match="several subsets: choose one with `subset`: extra, main"):
        hub.dataset_files("own/sums", None, None, "train")
    with pytest.raises(ConfigError, match="no file of the split 'validation'"):
        hub.dataset_files("own/sums", None, None, "validation")
