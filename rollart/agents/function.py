"""The driver of `agent: module:function`: runs in a forked process of its own, one episode each.

Standard library only: the Python may be that of the agent's own environment, without rollart in it.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import random
from dataclasses import asdict
from typing import Any

from rollart.core.endpoint import AgentEpisode, Endpoint
from rollart.core.foreign import InvalidValue, parse_verdict


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
    """A number is the reward; a dict may have `reward`, `success` and `info`, and more, which is info too; None leaves
    it to the reward function."""
    try:
        return asdict(parse_verdict(result))
    except InvalidValue as error:
        raise TypeError(
            f"what the agent returned is no verdict: {error}; return the reward as a number, a dict with `reward`, "
            "`success` and `info`, or nothing if a reward function scores the episode"
        ) from None
