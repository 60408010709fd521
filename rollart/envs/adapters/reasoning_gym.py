"""Any dataset of reasoning-gym: one question, one answer, and the dataset's own graded score of it."""

from __future__ import annotations

import re
from typing import Any

import reasoning_gym

from rollart.envs.adapters import instance

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
RULES = "\nGive the final answer between <answer> and </answer>."


class ReasoningGym:
    """`config` are the dataset's settings. With `tags` the answer should be in tags; else all of it is scored."""

    reusable = True

    def __init__(
        self, dataset: str, config: dict[str, Any] | None = None, tags: bool = False, held_out: bool = False
    ) -> None:
        self.dataset, self.config, self.tags, self.held_out = dataset, dict(config or {}), tags, held_out
        self.source: Any = None
        self.entry: dict[str, Any] = {}

    def reset(self, seed: int) -> str:
        config = {"size": 1, **self.config, "seed": instance(seed, self.held_out)}
        self.source = reasoning_gym.create_dataset(self.dataset, **config)
        self.entry = self.source[0]
        return str(self.entry["question"]) + (RULES if self.tags else "")

    def step(self, action: str) -> dict[str, Any]:
        found = ANSWER.findall(action)
        answer = (found[-1] if found else action).strip()
        score, info = 0.0, {"answer": self.entry.get("answer")}
        try:
            score = float(self.source.score_answer(answer, self.entry))
        except Exception as error:  # it cannot read the answer, which is wrong then; `info` shows a bug of its own
            info["scorer_error"] = f"{type(error).__name__}: {error}"[:200]
        info["success"] = score >= 1.0
        return {"messages": [], "reward": score, "done": True, "info": info}

    def close(self) -> None:
        pass


def player(env: ReasoningGym, rng: Any, *, skill: float = 1.0) -> str:
    """The dataset's own answer; with probability 1 - `skill` none. Some datasets store no answer."""
    answer = str(env.entry.get("answer") or "")
    text = answer if rng.random() < skill else ""
    return f"<answer>{text}</answer>" if env.tags else text
