"""Models and datasets of the Hugging Face hub: found in its local cache, or downloaded with huggingface_hub.

Imports huggingface_hub only when something is looked up, so that checking a run file without hub ids stays instant.
"""

import re
from pathlib import Path
from typing import Any

from rollart.core.errors import ConfigError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DESCRIPTION = ["*.json", "*.jinja", "*.model", "*.txt"]  # everything that `rollart check` reads, and the tokenizer
WEIGHTS = ["*.safetensors"]
WITHOUT_HUB = {"smollm2-135m": "`rollart models smollm2 models/smollm2-135m`"}  # by name, the command that makes it
TABLES = (".parquet", ".jsonl", ".json", ".csv")


def model_folder(id: str, revision: str | None, *, weights: bool) -> Path:
    """The folder of a model, downloaded unless it is in the cache; without `weights`, only its description.
    Raises ConfigError."""
    patterns = DESCRIPTION + (WEIGHTS if weights else [])
    folder = _snapshot(id, revision, kind="model", patterns=patterns)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"the repository {id} has no config.json: it is not a model in Hugging Face format")
    if weights and not any(folder.glob("*.safetensors")):
        raise ConfigError(_missing(id, revision, "the cache has its description, but not its safetensors files"))
    return folder


def dataset_files(id: str, revision: str | None, subset: str | None, split: str) -> list[Path]:
    """The files of one split, downloaded unless they are in the cache. Raises ConfigError."""
    patterns = [f"*{split}*{ending}" for ending in TABLES]
    folder = _snapshot(id, revision, kind="dataset", patterns=patterns)
    files = [file for file in sorted(folder.rglob("*")) if file.suffix in TABLES and _is_split(file, split)]
    subsets = sorted({file.parent.name for file in files if file.parent != folder})
    if subset is not None:
        files = [file for file in files if file.parent.name == subset]
    if not files:
        where = f" in the subset {subset!r}; it has {', '.join(subsets)}" if subset and subsets else ""
        raise ConfigError(f"the dataset {id} has no file of the split {split!r}{where}")
    if len({file.parent for file in files}) > 1:
        raise ConfigError(f"the dataset {id} has several subsets: choose one with `subset`: {', '.join(subsets)}")
    return files


def _is_split(file: Path, split: str) -> bool:
    """`train.jsonl`, `train-00000-of-00004.parquet`."""
    return re.fullmatch(rf"{re.escape(split)}(-\d+-of-\d+)?", file.stem) is not None


def _snapshot(id: str, revision: str | None, *, kind: str, patterns: list[str]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    wanted: dict[str, Any] = {"repo_type": kind, "revision": revision, "allow_patterns": patterns}
    try:
        return Path(snapshot_download(id, **wanted))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        pass  # no network: any snapshot of this revision that an earlier download left
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        known = {401: "it is private or does not exist; log in with `hf auth login`", 404: "it does not exist"}
        raise ConfigError(_missing(id, revision, known.get(status or 0, f"the hub answered {status}"))) from error
    except OSError as error:
        raise ConfigError(_missing(id, revision, f"the download failed: {error}")) from error
    try:
        return Path(snapshot_download(id, **wanted, local_files_only=True))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else "the hub cannot be reached"
        reason = f"it is neither a folder here nor in the cache of this machine, and {why}"
        raise ConfigError(_missing(id, revision, reason)) from None


def _missing(id: str, revision: str | None, reason: str) -> str:
    what = f"cannot get {id}{f' at revision {revision}' if revision else ''} from the Hugging Face hub: {reason}"
    without_hub = WITHOUT_HUB.get(id.rpartition("/")[2].lower().removesuffix("-instruct"))
    return f"{what}; {without_hub} makes a folder of it without the hub" if without_hub else what
