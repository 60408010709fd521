"""Opponents in games: one object for each other player in each game, called for every move."""

from __future__ import annotations

import random
import re
from typing import Any

from rollart.core.llm_client import NoReply, ask

MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")


class AnyMove:
    """A random one of the moves in square brackets that were shown last."""

    def __call__(self, observation: str, rng: random.Random) -> str:
        moves = [line for line in map(MOVE.findall, observation.splitlines()) if line]
        return rng.choice(moves[-1]) if moves else "[0]"


class Served:
    """A frozen model at an OpenAI-compatible `url`, such as that of `rollart serve`. It sees what our policy would see
    in its seat, and remembers the game. Its reply is its move, against the rules if it is none; no reply is a failure
    of the environment. `system` comes first, `options` are sent with every request."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str = "OPENAI_API_KEY",
        system: str = "",
        options: dict[str, Any] | None = None,
        seconds: float = 8.0,
    ) -> None:
        self.url, self.model, self.key, self.seconds = url, model, key, seconds
        self.options = {"max_tokens": 64, **(options or {})}
        self.messages = [{"role": "system", "content": system}] if system else []

    def __call__(self, observation: str, rng: random.Random) -> str:
        self.messages.append({"role": "user", "content": observation})
        options = {"seed": rng.randrange(2**31), **self.options}
        try:
            move = ask(
                self.url, self.model, self.messages, key=self.key, options=options, timeout=self.seconds, whole=False
            )
        except NoReply as error:
            raise RuntimeError(f"the opponent {self.model} {error}") from error
        self.messages.append({"role": "assistant", "content": move})
        return move
