"""A small agent to begin with: it talks to the policy over plain HTTP, and needs nothing but the standard library."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen

from rollart.core.endpoint import AgentEpisode, Endpoint

DEADLINE_S = 60.0


def digits(endpoint: Endpoint, episode: AgentEpisode) -> dict[str, Any]:
    """Asks for digits in `turns` turns of one conversation; the reward is the share of digits in what it gets."""
    messages: list[dict[str, Any]] = []
    said = ""
    for turn in range(int(episode.args.get("turns", 2))):
        messages.append({"role": "user", "content": f"digits {turn}"})
        answer = chat(endpoint, messages)
        messages.append({"role": "assistant", "content": answer})
        said += answer
    share = sum(letter in "0123456789" for letter in said) / max(1, len(said))
    return {"reward": share, "success": share > 0.9}


def chat(endpoint: Endpoint, messages: list[dict[str, Any]]) -> str:
    request = Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps({"model": endpoint.model, "messages": messages}).encode(),
        {"Authorization": f"Bearer {endpoint.key}", "Content-Type": "application/json"},
    )
    with urlopen(request, timeout=DEADLINE_S) as response:
        answer = json.load(response)
    return str(answer["choices"][0]["message"]["content"])
