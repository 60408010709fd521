"""The reward's side of a slot of the local pool: finds the function and gives it the episode."""

from typing import Any

import msgspec

from rollart.core.types import Episode
from rollart.rewards.runtime import another_version, call, find


class RewardShim:
    def score(self, reward: str, version: str, episode: dict[str, Any], args: dict[str, Any]) -> Any:
        function = find(reward)
        if wrong := another_version(function, reward, version):
            raise LookupError(wrong)
        [result] = call(function, [msgspec.convert(episode, Episode)], args)
        return msgspec.to_builtins(result)
