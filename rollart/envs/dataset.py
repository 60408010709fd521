"""Rows of a table as episodes of one turn: a prompt made from the row, and its answer for the reward.

The seeds of such a task count: the low half of a seed is the number of the episode, the high half the seed of the run,
which shuffles each pass over the rows. So the ledger's count of episodes is the cursor of the data, and a resumed run
goes on with the next row. Rows that are held out are chosen by their content, whatever their order or the seed.
"""

from __future__ import annotations

import csv
import hashlib
import json
import mmap
import random
import re
from array import array
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollart.core.errors import ConfigError
from rollart.core.seeds import episode_number
from rollart.models import hub

FIELD = re.compile(r"\{([A-Za-z_][\w.]*)\}")
Row = dict[str, Any]


class DatasetTask:
    """One question. The answer goes to the reward in `info["answer"]`, with the other columns in `info["row"]`."""

    reusable = True
    isolation = "shared"

    def __init__(self, dataset: dict[str, Any], held_out: bool = False) -> None:
        self._config, self._held_out = dataset, held_out
        self._rows = rows_of(json.dumps(dataset, sort_keys=True), held_out)
        if not self._rows:
            which = "held-out rows" if held_out else "rows to train on"
            raise ValueError(f"{dataset['path']} has no {which}; see `held_out` and `limit`")
        self.row: Row = {}

    def reset(self, seed: int) -> str | list[dict[str, str]]:
        shuffle, number = episode_number(seed)
        turn, place = divmod(number, len(self._rows))
        order = _order(len(self._rows), None if self._held_out else f"{shuffle} {turn}")
        self.row = self._rows[order[place]]
        prompt = fill(self._config["prompt"], self.row)
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        if system := self._config.get("system"):
            messages = [{"role": "system", "content": str(fill(system, self.row))}, *messages]
        return messages

    def step(self, action: str) -> dict[str, Any]:
        answer = self._config["answer"]
        info = {"answer": column(self.row, answer), "row": {k: v for k, v in self.row.items() if k != answer}}
        return {"messages": [], "reward": None, "done": True, "info": info}

    def close(self) -> None:
        pass


def player(env: DatasetTask, rng: random.Random, *, solution: str | None = None) -> str:
    """The column `solution`, by default the answer: a warmup on the data itself."""
    return str(column(env.row, solution or env._config["answer"]))


def fill(template: str, row: Row) -> str | list[dict[str, str]]:
    """The template with `{column}` replaced. One that is a single column of messages gives the messages.

    >>> fill("What is {question}?", {"question": "1+1"})
    'What is 1+1?'
    """
    only = FIELD.fullmatch(template)
    if only and isinstance(messages := column(row, only[1]), list):
        return [{"role": str(message["role"]), "content": str(message["content"])} for message in messages]
    return FIELD.sub(lambda match: str(column(row, match[1])), template)


def column(row: Row, name: str) -> Any:
    """Dots lead into nested values: `reward_model.ground_truth`."""
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"a row has no column {name!r}; it has {', '.join(map(repr, row))}")
        value = value[part]
    return value


@lru_cache(maxsize=8)
def _order(count: int, shuffle: str | None) -> Sequence[int]:
    order = array("q", range(count))
    if shuffle is not None:
        random.Random(f"dataset {shuffle}").shuffle(order)
    return order


@lru_cache(maxsize=8)
def rows_of(dataset: str, held_out: bool) -> Sequence[Row]:
    """The rows of one side. `dataset` is the section of the run file as JSON. Raises ConfigError."""
    config = json.loads(dataset)
    other = config.get("held_out")
    if isinstance(other, str):  # the rows of another file or split
        return Table(_files(config, other) if held_out else _files(config, config["split"]), limit=config.get("limit"))
    return Table(_files(config, config["split"]), limit=config.get("limit"), fraction=other, held_out=held_out)


def row_count(dataset: dict[str, Any], held_out: bool) -> int:
    return len(rows_of(json.dumps(dataset, sort_keys=True), held_out))


def _files(config: dict[str, Any], split: str) -> list[Path]:
    path = Path(config["path"] if split == config["split"] else split)
    if path.is_file():
        return [path]
    if hub.HUB_ID.fullmatch(config["path"]) and not Path(config["path"]).suffix:
        return hub.dataset_files(config["path"], config.get("revision"), config.get("subset"), split)
    raise ConfigError(f"there is no file {path}, and it is not the id of a dataset of the hub (owner/name)")


class Table(Sequence[Row]):
    """Rows of one or several files. JSON lines stay on disk, mapped into memory; other formats are read whole."""

    def __init__(
        self, files: Sequence[Path], *, limit: int | None = None, fraction: float | None = None, held_out: bool = False
    ) -> None:
        self._sources = [_open(file) for file in files]
        kept = array("q")
        for number, source in enumerate(self._sources):
            for place in range(len(source)):
                if fraction is None or (_chance(source.text(place)) < fraction) == held_out:
                    kept.append(number << 48 | place)
        self._kept = kept if limit is None else kept[:limit]

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: Any) -> Any:
        key = self._kept[index]
        row = json.loads(self._sources[key >> 48].text(key & (1 << 48) - 1))
        if not isinstance(row, dict):
            raise ValueError(f"row {index} is not an object with named columns")
        return row


class _Lines:
    """Texts of a file of JSON lines, by offset."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if file.stat().st_size else b""
        self._spans = array("q")
        start, size = 0, len(self._map)
        while start < size:
            end = self._map.find(b"\n", start)
            end = size if end < 0 else end
            if self._map[start:end].strip():
                self._spans.extend((start, end))
            start = end + 1

    def __len__(self) -> int:
        return len(self._spans) // 2

    def text(self, place: int) -> bytes:
        return bytes(self._map[self._spans[2 * place] : self._spans[2 * place + 1]])


class _Rows:
    """Rows in memory, each as JSON text."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._texts = [json.dumps(row, default=str).encode() for row in rows]

    def __len__(self) -> int:
        return len(self._texts)

    def text(self, place: int) -> bytes:
        return self._texts[place]


def _open(file: Path) -> _Lines | _Rows:
    if file.suffix == ".jsonl":
        return _Lines(file)
    if file.suffix == ".csv":
        with file.open(newline="", encoding="utf-8") as stream:
            return _Rows(list(csv.DictReader(stream)))
    if file.suffix == ".json":
        return _Rows(json.loads(file.read_text(encoding="utf-8")))
    if file.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError:
            raise ConfigError(f"{file} needs pyarrow: pip install 'rollart[frames]'") from None
        return _Rows(parquet.read_table(file).to_pylist())
    raise ConfigError(f"{file} is none of .jsonl, .json, .csv and .parquet")


def _chance(text: bytes) -> float:
    """A number from 0 to 1 that depends on the content of a row alone."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little") / (1 << 48)
