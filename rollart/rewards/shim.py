"""The reward's side of a slot: finds the function, gives it the episode and checks what it answers."""

import importlib
import math
from typing import Any

import msgspec

from rollart.types import Episode, RewardResult


class RewardShim:
    def score(self, reward: str, episode: dict[str, Any]) -> Any:
        module, _, name = reward.partition(":")
        function = getattr(importlib.import_module(module), name)
        return msgspec.to_builtins(checked(function(msgspec.convert(episode, Episode))))


def checked(answer: object) -> RewardResult:
    """A finite number is a result without parts; anything else must be a RewardResult in good order."""
    result = answer if isinstance(answer, RewardResult) else RewardResult(finite("it", answer))
    if result.success is not None and not isinstance(result.success, bool):
        raise TypeError(f"`success` is {result.success!r:.60}; true, false or None is wanted")
    if not isinstance(result.parts, dict):
        raise TypeError(f"`parts` is {result.parts!r:.60}; a dict of numbers is wanted")
    parts = {str(name): finite(f"part {name!r}", value) for name, value in result.parts.items()}
    return RewardResult(finite("`value`", result.value), parts, result.success)


def finite(what: str, value: object) -> float:
    if not isinstance(value, int | float) and hasattr(value, "item"):
        value = value.item()  # numpy and torch scalars
    if not isinstance(value, int | float):
        raise TypeError(f"{what} is {value!r:.60} ({type(value).__name__}); a number or a RewardResult is wanted")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {value}; a finite number is wanted")
    return float(value)
