"""What an agent gets: the endpoint for completions and the episode it plays. Standard library only.

A Python without rollart and its dependencies can import this, so agents can run in their own environments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HELD_OUT = 5  # one item of a dataset in five is for evaluation only


@dataclass(frozen=True)
class Endpoint:
    """`url` is the gateway, without a path; the key ends with the episode; `tokenizer` is a folder, the policy's."""

    url: str
    key: str = field(repr=False)
    model: str = "policy"
    tokenizer: str = ""

    @property
    def base_url(self) -> str:
        """For clients of OpenAI's APIs."""
        return f"{self.url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """For clients of Anthropic's API, which add `/v1` themselves."""
        return self.url

    @property
    def keyed_url(self) -> str:
        """For clients that cannot send a key: it is in the path. OpenAI clients add `/v1`."""
        return f"{self.url}/k/{self.key}"

    def environ(self) -> dict[str, str]:
        """The environment variables that clients read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_MODEL": self.model,
        }


@dataclass(frozen=True)
class AgentEpisode:
    """`seed` names the episode: members of a group share it. `args` are the task's."""

    id: str
    task: str
    seed: int
    held_out: bool = False
    args: dict[str, Any] = field(default_factory=dict)

    def choose(self, names: Sequence[str]) -> int:
        """Index of the item that this episode plays, for agents with a dataset. One item in `HELD_OUT` is held out for
        evaluation, by the hash of its name; a single item is for both."""
        order = sorted(range(len(names)), key=lambda index: hashlib.sha256(names[index].encode()).digest())
        kept = max(1, len(order) // HELD_OUT) if len(order) > 1 else 0
        allowed = (order[:kept] if self.held_out else order[kept:]) or order
        return allowed[self.seed % len(allowed)]
