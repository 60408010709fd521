"""The reward's side of a slot: finds the function, gives it the episode, checks what it answers."""

import importlib
import math
from typing import Any

import msgspec

from rollart.types import Episode, RewardResult


class RewardShim:
    def score(self, reward: str, episode: dict[str, Any]) -> RewardWire:
        module, _, name = reward.partition(":")
        function = getattr(importlib.import_module(module), name)
        return checked(reward, function(msgspec.convert(episode, Episode)))
