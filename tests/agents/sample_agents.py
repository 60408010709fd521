"""Agents that behave, and agents that do not. They talk to the gateway with the standard library."""

import asyncio
import os
import threading
import time
from typing import Any

from rollart.agents.demo import chat
from rollart.agents.endpoint import AgentEpisode, Endpoint

ASK = [{"role": "user", "content": "hello"}]


def two_turns(endpoint: Endpoint, episode: AgentEpisode) -> dict[str, Any]:
    first = chat(endpoint, ASK)
    second = chat(endpoint, [*ASK, {"role": "assistant", "content": first}, *ASK])
    info = {"said": [first, second], "seed": episode.seed, "held_out": episode.held_out, "args": episode.args}
    return {"reward": 0.5, "success": True, "info": info}


async def sub_agents(endpoint: Endpoint, episode: AgentEpisode) -> float:
    """Three at once, from one beginning."""
    first = await asyncio.to_thread(chat, endpoint, ASK)
    asked = [
        [*ASK, {"role": "assistant", "content": first}, {"role": "user", "content": f"part {n}"}] for n in range(3)
    ]
    answers = await asyncio.gather(*(asyncio.to_thread(chat, endpoint, each) for each in asked))
    return sum(answer < "a" for answer in answers) / 3


def by_environment(endpoint: Endpoint, episode: AgentEpisode) -> float:
    """Finds the gateway as a program would."""
    found = Endpoint(os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), os.environ["OPENAI_API_KEY"])
    chat(found, ASK)
    return 1.0


def no_reward(endpoint: Endpoint, episode: AgentEpisode) -> None:
    chat(endpoint, ASK)


def crash(endpoint: Endpoint, episode: AgentEpisode) -> float:
    chat(endpoint, ASK)
    raise RuntimeError("I give up")


def killed(endpoint: Endpoint, episode: AgentEpisode) -> float:
    chat(endpoint, ASK)
    os._exit(9)


def hang(endpoint: Endpoint, episode: AgentEpisode) -> float:
    chat(endpoint, ASK)
    threading.Thread(target=time.sleep, args=(1000,)).start()
    time.sleep(1000)
    return 1.0


def silent(endpoint: Endpoint, episode: AgentEpisode) -> float:
    return 1.0


def nonsense(endpoint: Endpoint, episode: AgentEpisode) -> str:
    chat(endpoint, ASK)
    return "a reward"


def not_a_number(endpoint: Endpoint, episode: AgentEpisode) -> float:
    chat(endpoint, ASK)
    return float("nan")


def length(episode: Any) -> float:
    """A reward function: the turns of an episode."""
    return float(len(episode.turns))
