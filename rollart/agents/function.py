"""The driver of `agent: module:function`: runs in a forked process of its own, one episode each.

Standard library only: the Python may be that of the agent's own environment, without rollart in it.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import os
import random
from typing import Any

from rollart.core.endpoint import AgentEpisode, Endpoint


class FunctionAgent:
    """A driver: `run` plays one episode and returns its `outcome`."""

    def run(self, agent: str, endpoint: dict[str, Any], episode: dict[str, Any]) -> dict[str, Any]:
        where = Endpoint(**endpoint)
        os.environ.update(where.environ())  # for frameworks that read only the environment
        random.seed(episode["seed"])
        module, _, name = agent.partition(":")
        result = getattr(importlib.import_module(module), name)(where, AgentEpisode(**episode))
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return outcome(result)


async def _awaited(result: Any) -> Any:
    return await result


def outcome(result: Any) -> dict[str, Any]:
    """A number is the reward; a dict may have `reward`, `success` and `info`; None leaves it to the reward function."""
    if result is None:
        return {}
    if isinstance(result, bool):
        return {"reward": float(result), "success": result}
    if isinstance(result, int | float):
        result = {"reward": result}
    if not isinstance(result, dict) or not set(result) <= {"reward", "success", "info"}:
        raise TypeError(
            f"the agent returned {str(result)[:100]!r}; return the reward as a number, a dict with `reward`, `success` "
            "and `info`, or nothing if a reward function scores the episode"
        )
    reward = result.get("reward")
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"the agent returned the reward {reward}; it must be a finite number")
    return dict(result, reward=None if reward is None else float(reward))
