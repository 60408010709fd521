"""Adroit: a hand with 24 joints opens doors, hammers, turns pens and relocates balls (gymnasium-robotics)."""

from __future__ import annotations

from typing import Any

import gymnasium
import gymnasium_robotics
import numpy

from rollart.envs.adapters.continuous import ContinuousEnvironment

gymnasium.register_envs(gymnasium_robotics)
IDS = {name: f"AdroitHand{name.capitalize()}-v1" for name in ("door", "hammer", "pen", "relocate")}


class Adroit(ContinuousEnvironment):
    """`task` is door, hammer, pen or relocate. It has no expert: demonstrations come from files."""

    camera = -1  # the free one

    def __init__(self, task: str, *, horizon: int = 200, tail: int = 0, video: int = 0, held_out: bool = False) -> None:
        super().__init__(horizon, tail, video, held_out)
        if task not in IDS:
            raise ValueError(f"Adroit has no task {task!r}; its tasks are {', '.join(IDS)}")
        self.env = gymnasium.make(IDS[task]).unwrapped
        self.actions = int(self.env.action_space.shape[0])

    def _reset(self, seed: int) -> Any:
        return self.env.reset(seed=seed)[0]

    def _step(self, command: Any) -> tuple[Any, float, bool, bool]:
        seen, reward, _, _, info = self.env.step(numpy.clip(command, -1, 1))
        return seen, float(reward), bool(info["success"]), False
