"""Agents that behave, and agents that do not. They talk to the gateway with the standard library."""

import asyncio
import json
import os
import threading
import time
from typing import Any
from urllib.request import Request, urlopen

from rollart.agents.demo import chat
from rollart.core.endpoint import AgentEpisode, Endpoint

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


def streams(endpoint: Endpoint, episode: AgentEpisode) -> dict[str, Any]:
    """Leaves one stream in the middle, reads another to its end, and asks for a third that ends at a vowel."""
    with _asked(endpoint, ASK, stream=True) as left:
        left.readline()
    with _asked(endpoint, ASK, stream=True) as read:
        events = [json.loads(line[6:]) for line in read if line.startswith(b"data: {")]
    texts = [text for event in events if (text := event["choices"][0]["delta"].get("content"))]
    more = [*ASK, {"role": "assistant", "content": "".join(texts)}, *ASK]
    with _asked(endpoint, more, stop=list("aeiou")) as ended:
        choice = json.load(ended)["choices"][0]
    return {"reward": float(choice["finish_reason"] == "stop"), "info": {"pieces": len(texts)}}


def _asked(endpoint: Endpoint, messages: list[dict[str, Any]], **more: Any) -> Any:
    body = json.dumps({"model": endpoint.model, "messages": messages, **more}).encode()
    headers = {"Authorization": f"Bearer {endpoint.key}", "Content-Type": "application/json"}
    return urlopen(Request(f"{endpoint.base_url}/chat/completions", body, headers), timeout=60)


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


def strict(endpoint: Endpoint, episode: AgentEpisode) -> float:
    """Some frameworks raise at an answer that is not complete."""
    chat(endpoint, ASK)
    raise RuntimeError("the response is incomplete")


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


def text_as_info(endpoint: Endpoint, episode: AgentEpisode) -> Any:
    chat(endpoint, ASK)
    return {"reward": 1.0, "info": "text"}


def huge_integer(endpoint: Endpoint, episode: AgentEpisode) -> Any:
    chat(endpoint, ASK)
    return {"reward": 1.0, "seed": 2**70}


def more_keys(endpoint: Endpoint, episode: AgentEpisode) -> Any:
    chat(endpoint, ASK)
    return {"reward": 1.0, "letters": 3}


def length(episode: Any) -> float:
    """A reward function: the turns of an episode."""
    return float(len(episode.turns))
