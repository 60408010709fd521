"""The reward's side of a slot of the local pool: finds the function and gives it the episode."""

from typing import Any

import msgspec

from rollart.rewards.runtime import call, find
from rollart.types import Episode


class RewardShim:
    def score(self, reward: str, episode: dict[str, Any], args: dict[str, Any]) -> Any:
        [result] = call(find(reward), [msgspec.convert(episode, Episode)], args)
        return msgspec.to_builtins(result)
