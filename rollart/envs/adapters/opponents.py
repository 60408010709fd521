"""Who has the other seats of a game: one is made for each of them in each game, and asked for every move."""

from __future__ import annotations

import random
import re
from typing import Any

from rollart.core.llm_client import NoReply, ask

MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")


class AnyMove:
    """One of the moves in square brackets that were shown last."""

    def __call__(self, observation: str, rng: random.Random) -> str:
        moves = [line for line in map(MOVE.findall, observation.splitlines()) if line]
        return rng.choice(moves[-1]) if moves else "[0]"


class Served:
    """A frozen model at an OpenAI-compatible `url`, such as that of `rollart serve`. It is told what our own policy is
    told in its seat, and remembers the game. What it says is its move, and against the rules if that is none; that it
    cannot be asked is a failure of the environment. `system` comes first, `options` go with every question."""

    def __init__(
        self,
        url: str,
        model: str,
        key: str = "OPENAI_API_KEY",
        system: str = "",
        options: dict[str, Any] | None = None,
        seconds: float = 8.0,
    ) -> None:
        self.url, self.model, self.key, self.seconds = url, model, key, seconds
        self.options = {"max_tokens": 64, **(options or {})}
        self.said = [{"role": "system", "content": system}] if system else []

    def __call__(self, observation: str, rng: random.Random) -> str:
        self.said.append({"role": "user", "content": observation})
        options = {"seed": rng.randrange(2**31), **self.options}
        try:
            move = ask(
                self.url, self.model, self.said, key=self.key, options=options, timeout=self.seconds, whole=False
            )
        except NoReply as error:
            raise RuntimeError(f"the opponent {self.model} {error}") from error
        self.said.append({"role": "assistant", "content": move})
        return move
