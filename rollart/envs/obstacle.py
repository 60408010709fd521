"""A point that goes around an obstacle, above or below it: the smallest task with two right answers.

Their mean runs straight into the obstacle, so a policy that averages its demonstrations fails. Needs no family.
"""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy

from rollart.envs.adapters.continuous import ContinuousEnvironment

SPEED = 0.1  # the longest step
RADIUS, START, GOAL, NEAR = 0.5, -0.9, 1.2, 0.12
CLEARANCE = 0.14  # between the expert and the obstacle


class Obstacle(ContinuousEnvironment):
    """Observes its position; an action is a step, at most 1 long in each direction."""

    actions = 2

    def __init__(self, *, horizon: int = 60, tail: int = 0, video: int = 0, held_out: bool = False) -> None:
        super().__init__(horizon, tail, video, held_out)
        self.side = 1.0
        self._random = random.Random()

    def _reset(self, seed: int) -> Any:
        self._random.seed(seed)
        self.side = self._random.choice((-1.0, 1.0))  # of the expert; nothing that is observed tells it
        return numpy.array([START, self._random.uniform(-0.05, 0.05)])

    def _step(self, command: Any) -> tuple[Any, float, bool, bool]:
        seen = self.seen + SPEED * numpy.clip(command, -1, 1)
        hit = math.hypot(*seen) < RADIUS or bool((abs(seen) > 2).any())
        success = not hit and math.dist(seen, (GOAL, 0)) < NEAR
        return seen, float(success), success, hit


def player(env: Obstacle, rng: random.Random) -> str:
    """Along the tangent of a circle around the obstacle, then to the goal."""
    x, y = env.seen
    distance, safe = math.hypot(x, y), RADIUS + CLEARANCE
    to_goal = math.atan2(-y, GOAL - x)
    if x < 0 or (math.dist((x, y), (GOAL, 0)) ** 2 > GOAL**2 - safe**2 and abs(y) > NEAR):
        inward = math.atan2(-y, -x)
        heading = inward + env.side * math.asin(min(1.0, safe / distance))
    else:
        heading = to_goal
    return json.dumps([[math.cos(heading), math.sin(heading)]])
