"""Games of TextArena for one or more players: our policy has one seat, scripted opponents or frozen models the others.

The `-raw` games are used: they show each player only what is new. TextArena rewards only at the end.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import textarena

from rollart.envs.adapters import instance
from rollart.envs.adapters.opponents import AnyMove

Opponent = Callable[[str, random.Random], str]


class TextArena:
    """`opponent` is `module:Class`, constructed with `opponent_args` for each other seat in each game, and called for
    each move with what is new and a random generator. `seat` None: drawn by the seed. A reward of 1 is a success."""

    reusable = True

    def __init__(
        self,
        game: str,
        *,
        players: int = 1,
        opponent: str = "rollart.envs.adapters.opponents:AnyMove",
        opponent_args: dict[str, Any] | None = None,
        seat: int | None = None,
        options: dict[str, Any] | None = None,
        held_out: bool = False,
    ) -> None:
        if seat is not None and not 0 <= seat < players:
            raise ValueError(f"`seat` {seat} is not one of the {players} seats, which count from 0")
        self.game = textarena.make(game if game.endswith("-raw") else f"{game}-raw", **(options or {}))
        module, _, name = opponent.partition(":")
        self.opponent: Callable[..., Opponent] = getattr(importlib.import_module(module), name)
        self.opponent_args = opponent_args or {}
        self.others: dict[int, Opponent] = {}
        self.players, self.fixed_seat, self.held_out = players, seat, held_out
        self.seat = 0
        self.seen = ""
        self.rng = random.Random()

    def reset(self, seed: int) -> str:
        seed = instance(seed, self.held_out)
        self.rng = random.Random(f"textarena {seed}")
        drawn = self.rng.randrange(self.players)
        # An opponent may lose before our turn; then a new game starts with our move.
        for seat in (drawn, 0) if self.fixed_seat is None else (self.fixed_seat,):
            self.seat, self.others = seat, {}
            self.game.reset(num_players=self.players, seed=seed)
            if not self._others_move():
                return self.seen
        raise ValueError("the game was over before it was our turn; choose another `seat` or `opponent`")

    def step(self, action: str) -> dict[str, Any]:
        over, _ = self.game.step(action)
        if not over and not self._others_move():
            return {"messages": self.seen, "reward": None, "done": False}
        rewards, details = self.game.close()
        reward = float(rewards[self.seat])
        about = details.get(self.seat, {})
        info = {"success": reward >= 1.0, "reason": str(about.get("reason", "")), "seat": self.seat}
        return {"messages": info["reason"], "reward": reward, "done": True, "info": info}

    def close(self) -> None:
        pass

    def _others_move(self) -> bool:
        """Play until it is our turn, or the game is over."""
        while True:
            player, messages = self.game.get_observation()
            text = "\n".join(_line(*item) for item in messages if item[0] != player)
            if player == self.seat:
                self.seen = text or "It is your turn."
                return False
            if player not in self.others:
                self.others[player] = self.opponent(**self.opponent_args)
            over, _ = self.game.step(self.others[player](text, self.rng))
            if over:
                return True


def _line(speaker: int, text: str, kind: object) -> str:
    return text if speaker < 0 else f"Player {speaker}: {text}"


def player(env: TextArena, rng: random.Random, *, skill: float = 1.0) -> str:
    """Bisects in GuessTheNumber with probability `skill`; otherwise, and in other games, a random move."""
    state = env.game.state.game_state
    if "guess_history" not in state or "game_number" not in state or rng.random() >= skill:
        return AnyMove()(env.seen, rng)
    low, high = env.game.min_number, env.game.max_number
    for guess, hint in state["guess_history"]:
        low, high = (guess + 1, high) if hint == "higher" else (low, guess - 1)
    return f"[{(low + high) // 2}]"
