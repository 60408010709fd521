"""Reward functions that ship with rollart. Each is a pure function of an episode."""

import re

from rollart.core.types import Episode, RewardResult

NUMBER = re.compile(r"-?[0-9]+")


def env_return(episode: Episode) -> RewardResult:
    """The sum of the environment's rewards; `success` as the environment reports it."""
    success = episode.info.get("success")
    return RewardResult(episode.env_return, success=success if isinstance(success, bool) else None)


def column_sum(episode: Episode) -> RewardResult:
    """0.8 for the right last number, and 0.2 for the share of columns that are right and in order.

    Columns beyond those of the sum lower that share, so writing more cannot pay.
    """
    *written, last = episode.turns[-1].action.split(";")
    expected = _columns(str(episode.info["expression"]))
    right = sum(one.strip() == column for one, column in zip(written, expected, strict=False))
    numbers = NUMBER.findall(last)
    answer = bool(numbers) and numbers[-1] == episode.info["answer"]
    parts = {"answer": float(answer), "columns": right / max(len(expected), len(written))}
    return RewardResult(0.8 * parts["answer"] + 0.2 * parts["columns"], parts=parts, success=answer)


def _columns(expression: str) -> list[str]:
    """How `347+285` is worked out: `7+5=12`, `4+8+1=13`, `3+2+1=6`."""
    left, right = expression.split("+")
    carry, columns = 0, []
    for one, other in zip(reversed(left), reversed(right), strict=True):
        total = int(one) + int(other) + carry
        columns.append(f"{one}+{other}{'+1' if carry else ''}={total}")
        carry = total // 10
    return columns
