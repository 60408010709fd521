"""Environments of a given pace or shape, for benchmarks and tests. Standard library only."""

from __future__ import annotations

import random
import time
from typing import Any

from benchmarks.fault_injection import RESET_QUANTILES, STEP_QUANTILES, Chaos, draw
from rollart.agents.demo import chat
from rollart.core.endpoint import AgentEpisode, Endpoint

LETTERS = "abcdefghijklmnopqrstuvwxyz "
BODY = 0.979  # of the resets are of the first mode
FIRST_MODE = tuple((at / BODY, seconds) for at, seconds in RESET_QUANTILES if at <= BODY)


class Paced:
    """As slow as one in a container, without its failures: `steps` steps, each and the reset taking `scale` times what
    the RollArt paper measured. Of its resets the second mode, one in fifty, is a failure and left to Chaos."""

    def __init__(self, steps: int = 10, scale: float = 0.01, reusable: bool = True) -> None:
        self.steps, self.scale, self.reusable = steps, scale, reusable
        self.rng = random.SystemRandom()
        self.left = 0

    def reset(self, seed: int) -> str:
        time.sleep(self.scale * draw(FIRST_MODE, self.rng))
        self.left = self.steps
        return "begin"

    def step(self, action: str) -> tuple[str, float, bool]:
        time.sleep(self.scale * draw(STEP_QUANTILES, self.rng))
        self.left -= 1
        return "go on", 1.0 if self.left == 0 else 0.0, self.left == 0

    def close(self) -> None:
        pass


class Gaussian:
    """`turns` turns of `mean` seconds, with a standard deviation of `sigma` times that, never negative."""

    reusable = True

    def __init__(self, turns: int, mean: float, sigma: float) -> None:
        self.turns, self.mean, self.sigma = turns, mean, sigma
        self.rng = random.SystemRandom()
        self.left = 0

    def reset(self, seed: int) -> str:
        self.left = self.turns
        return "begin"

    def step(self, action: str) -> tuple[str, float, bool]:
        time.sleep(max(0.0, self.rng.gauss(self.mean, self.sigma * self.mean)))
        self.left -= 1
        return "go on", 0.0, self.left == 0

    def close(self) -> None:
        pass


class Ordinary(Chaos):
    """Delayed, without the one reset in fifty that takes minutes."""

    reset_quantiles = FIRST_MODE


class Shaped:
    """Any action is right. Observations differ between seeds and turns, so prefix caches help no more than in a real
    task."""

    reusable = True

    def __init__(self, turns: int = 8, characters: int = 100, held_out: bool = False) -> None:
        self.turns, self.characters, self.held_out = turns, characters, held_out
        self._rng = random.Random()
        self._left = 0

    def reset(self, seed: int) -> str:
        self._rng = random.Random(f"shaped {seed} {self.held_out}")
        self._left = self.turns
        return self._observation()

    def step(self, action: str) -> tuple[str, float, bool]:
        self._left -= 1
        return self._observation(), 1.0 if action else 0.0, self._left <= 0

    def close(self) -> None:
        pass

    def _observation(self) -> str:
        return "".join(self._rng.choices(LETTERS, k=self.characters))


def agent(endpoint: Endpoint, episode: AgentEpisode) -> dict[str, Any]:
    """Plays `Shaped` by itself, through the gateway: reads, asks for an answer, works for as long as a step takes."""
    args, rng = episode.args, random.SystemRandom()
    env = Shaped(int(args["turns"]), int(args["characters"]))
    text, done, messages = env.reset(episode.seed), False, []
    while not done:
        messages.append({"role": "user", "content": text})
        answer = chat(endpoint, messages)
        messages.append({"role": "assistant", "content": answer})
        time.sleep(float(args["delay"]) * draw(STEP_QUANTILES, rng))
        text, _, done = env.step(answer)
    return {"reward": 1.0}
