"""Datasets as tasks: rows become prompts, the split depends on content alone, and episodes walk through all rows."""

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.config.task import DatasetConfig
from rollart.core.seeds import numbered_seed
from rollart.envs.dataset import DatasetTask, player, rows_of

ROWS = [{"question": f"{n}+1", "answer": str(n + 1), "more": {"level": n % 3}} for n in range(60)]


def write(path: Path, rows: Sequence[dict[str, Any]] = ROWS) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def task(path: Path, held_out: bool = False, **settings: Any) -> DatasetTask:
    return DatasetTask(DatasetConfig(path=str(path), **settings).model_dump(), held_out)


def questions(made: DatasetTask, count: int, seed: int = 0, first: int = 0) -> list[str]:
    return [made.reset(numbered_seed(seed, first + n))[-1]["content"] for n in range(count)]  # type: ignore[index]


def sides(path: Path, **settings: Any) -> tuple[set[str], set[str]]:
    config = json.dumps(DatasetConfig(path=str(path), **settings).model_dump(), sort_keys=True)
    train, test = rows_of(config, False), rows_of(config, True)
    return {row["question"] for row in train}, {row["question"] for row in test}


def test_every_row_is_trained_or_held_out_and_none_is_both(tmp_path: Path) -> None:
    train, test = sides(write(tmp_path / "rows.jsonl"), held_out=0.3)
    assert train | test == {row["question"] for row in ROWS}
    assert not train & test
    assert test


def test_the_split_depends_on_content_and_not_on_order(tmp_path: Path) -> None:
    first = sides(write(tmp_path / "a.jsonl"))
    assert sides(write(tmp_path / "b.jsonl", list(reversed(ROWS)))) == first


@given(seed=st.integers(0, 2**31 - 1), passes=st.integers(0, 3))
def test_each_pass_shows_every_row_once_in_an_order_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, seed: int, passes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "shuffled.jsonl"
    made = task(path if path.exists() else write(path))
    count = len(rows_of(json.dumps(DatasetConfig(path=str(path)).model_dump(), sort_keys=True), False))
    one = questions(made, count, seed, passes * count)
    next_one = questions(made, count, seed, (passes + 1) * count)
    assert sorted(one) == sorted(next_one) and len(set(one)) == count
    assert one != next_one


def test_the_same_held_out_rows_come_in_the_same_order_whatever_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl")
    assert questions(task(path, held_out=True), 4, seed=1) == questions(task(path, held_out=True), 4, seed=2)


def test_prompt_system_and_nested_answer_come_from_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl")
    made = task(path, prompt="Add: {question} ({more.level}) {}", system="Level {more.level}", answer="more.level")
    system, user = made.reset(0)
    assert isinstance(system, dict) and isinstance(user, dict)
    row = made.row
    assert system == {"role": "system", "content": f"Level {row['more']['level']}"}
    assert user["content"] == f"Add: {row['question']} ({row['more']['level']}) {{}}"
    step = made.step("whatever")
    assert step["done"] and step["reward"] is None and step["info"]["answer"] == row["more"]["level"]


def test_a_column_of_messages_is_the_conversation(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(tmp_path / "chat.jsonl", [{"prompt": chat, "answer": str(n)} for n in range(30)])
    assert task(path, prompt="{prompt}").reset(0) == chat


def test_json_csv_and_parquet_give_the_same_prompts(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"question": row["question"], "answer": row["answer"]} for row in ROWS]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    with (tmp_path / "rows.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = {ending: sides(tmp_path / f"rows.{ending}") for ending in ("json", "csv", "parquet")}
    assert found["json"] == found["csv"] == found["parquet"]


def test_another_file_can_be_the_held_out_one(tmp_path: Path) -> None:
    test = write(tmp_path / "test.jsonl", [{"question": "2+2", "answer": "4"}])
    train, held_out = sides(write(tmp_path / "train.jsonl"), held_out=str(test))
    assert held_out == {"2+2"} and len(train) == len(ROWS)


def test_the_player_says_the_answer_or_a_column_of_solutions(tmp_path: Path) -> None:
    made = task(write(tmp_path / "rows.jsonl"))
    made.reset(5)
    assert player(made, random.Random(0)) == made.row["answer"]
    assert player(made, random.Random(0), solution="question") == made.row["question"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"prompt": "{qestion}"}, "no column 'qestion'"),
        ({"answer": "label"}, "no column 'label'"),
    ],
)
def test_what_cannot_work_is_reported_with_its_cause(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    path = write(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=reason):
        made = task(path, **settings)
        made.reset(0)
        made.step("")


def test_a_file_without_rows_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rows to train on"):
        task(write(tmp_path / "empty.jsonl", []))
