"""Environments of GEM (`gem-llm`): games, and puzzles of reasoning-gym, played in text."""

from __future__ import annotations

from typing import Any

import gem

from rollart.envs.adapters import instance


class Gem:
    """`options` go to `gem.make`. Success is a last reward of 1 or more, as GEM gives it for a solution."""

    reusable = True

    def __init__(self, id: str, options: dict[str, Any] | None = None, held_out: bool = False) -> None:
        self.env = gem.make(id, **(options or {}))
        self.held_out = held_out

    def reset(self, seed: int) -> str:
        return _text(*self.env.reset(seed=instance(seed, self.held_out)))

    def step(self, action: str) -> dict[str, Any]:
        seen, reward, terminated, truncated, info = self.env.step(action)
        over = bool(terminated or truncated)
        success = {"success": float(reward) >= 1.0} if over else {}
        messages = [] if over and "TERMINAL_STATE" in seen else _text(seen, info)
        step = {"messages": messages, "reward": float(reward), "info": success}
        return {**step, "done": bool(terminated), "truncated": bool(truncated and not terminated)}

    def close(self) -> None:
        pass  # GEM's environments have no resources, and most no such method


def _text(seen: str, info: dict[str, Any]) -> str:
    """GEM returns the suffix of an observation separately."""
    return "\n".join(part for part in (seen, info.get("suffix", "")) if part)


def player(env: Gem, rng: Any, *, skill: float = 1.0) -> str:
    """Solves TowerofHanoi with probability `skill`; otherwise, and in other games, GEM's own random action."""
    towers = getattr(env.env, "board", None)
    if not isinstance(towers, dict) or rng.random() >= skill:
        return str(env.env.sample_random_action())
    source, target = _hanoi_move({name: list(disks) for name, disks in towers.items()})
    return f"\\boxed{{{source} {target}}}"


def _hanoi_move(towers: dict[str, list[int]]) -> tuple[str, str]:
    """The next move of the shortest solution: the largest disk that is not where it should be, once it is free."""
    where = {disk: name for name, disks in towers.items() for disk in disks}
    target, move = "C", ("A", "C")
    for disk in sorted(where, reverse=True):
        if where[disk] != target:
            move = (where[disk], target)
            target = next(name for name in "ABC" if name not in move)  # where the smaller ones go first
    return move
