"""The tasks of `peers.py` for a Python that has none of rollart's dependencies: the standard library is enough."""

import re
from typing import Any

from benchmarks.fault_injection import Chaos
from rollart.envs.addition import Addition

NUMBER = re.compile(r"-?[0-9]+")


class WrittenSum:
    """`column_sum` of rows that were drawn beforehand, since reasoning-gym draws them; the seed is the row's number."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self._row: dict[str, Any] = {}

    def reset(self, seed: int) -> str:
        self._row = self._rows[seed % len(self._rows)]
        return str(self._row["prompt"])

    def step(self, action: str) -> dict[str, Any]:
        reward, success = score_written_sum(action, self._row["columns"], self._row["answer"])
        return {"messages": [], "reward": reward, "done": True, "info": {"success": success}}


def score_written_sum(action: str, columns: list[str], answer: str) -> tuple[float, bool]:
    """Reward and success, as `rollart.rewards.functions.column_sum` gives them; `peers.py` checks that it does."""
    *written, last = action.split(";")
    right = sum(one.strip() == column for one, column in zip(written, columns, strict=False))
    numbers = NUMBER.findall(last)
    success = bool(numbers) and numbers[-1] == answer
    return 0.8 * success + 0.2 * (right / max(len(columns), len(written))), success


def make_env(spec: dict[str, Any], held_out: bool) -> Any:
    if spec["task"] == "column_sum":
        return WrittenSum(spec["held_out_rows" if held_out else "rows"])
    if spec["task"] == "addition":
        return Addition(**spec["env_args"], held_out=held_out)
    return Chaos(spec["env"], spec["env_args"], delay=spec["delay"], held_out=held_out)
