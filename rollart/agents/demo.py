"""A small example agent: plain HTTP, standard library only."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request

from rollart.core.endpoint import AgentEpisode, Endpoint
from rollart.core.llm_client import open_url

DEADLINE_S = 60.0


def digits(endpoint: Endpoint, episode: AgentEpisode) -> dict[str, Any]:
    """Asks for digits in `turns` turns of one conversation; the reward is the share of digits in the answers."""
    messages: list[dict[str, Any]] = []
    text = ""
    for turn in range(int(episode.args.get("turns", 2))):
        messages.append({"role": "user", "content": f"digits {turn}"})
        answer = chat(endpoint, messages)
        messages.append({"role": "assistant", "content": answer})
        text += answer
    share = sum(letter in "0123456789" for letter in text) / max(1, len(text))
    return {"reward": share, "success": share > 0.9}


def chat(endpoint: Endpoint, messages: list[dict[str, Any]]) -> str:
    request = Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps({"model": endpoint.model, "messages": messages}).encode(),
        {"Authorization": f"Bearer {endpoint.key}", "Content-Type": "application/json"},
    )
    with open_url(request, timeout=DEADLINE_S) as response:
        answer = json.load(response)
    return str(answer["choices"][0]["message"]["content"])
