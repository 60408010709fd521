"""A reward given by a reward model, as `rollart reward-model` or others export it: the score of the last token.

Torch is imported with this module, so the host of rewards imports it once and its processes share it.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from rollart.core.types import Episode, RewardResult
from rollart.models.chat import ChatRenderer, conversation_tokens
from rollart.models.folder import is_reward_model


def reward_model(
    episodes: Sequence[Episode],
    *,
    model: str,
    scale: float = 1.0,
    passed: float | None = None,
    max_tokens: int | None = None,
    threads: int = 1,
) -> list[RewardResult]:
    """The score of each conversation, times `scale`. `model` is a folder; a score of `passed` or more is a success.
    Conversations are cut off after `max_tokens`; by default at the model's context."""
    torch.set_num_threads(threads)
    scorer = _scorer(str(Path(model).absolute()))
    scores = [scorer.score(episode, max_tokens) for episode in episodes]
    return [
        RewardResult(scale * score, parts={"score": score}, success=None if passed is None else score >= passed)
        for score in scores
    ]


reward_model.batch = True  # type: ignore[attr-defined]


class _Scorer:
    def __init__(self, folder: Path) -> None:
        if not is_reward_model(folder):
            raise ValueError(f"{folder} is not a reward model: its config.json names no ForSequenceClassification")
        self._renderer = ChatRenderer(folder)
        kind: Any = AutoModelForSequenceClassification
        self._model = kind.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
        self._context = int(getattr(self._model.config, "max_position_embeddings", 0) or 1 << 30)

    @torch.no_grad()
    def score(self, episode: Episode, max_tokens: int | None) -> float:
        tokens, _ = conversation_tokens(self._renderer, episode.turns)
        tokens = tokens[: min(max_tokens or self._context, self._context)]
        states = self._model.base_model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0, -1:]
        return float(self._model.score(states)[0, 0])


@lru_cache(maxsize=2)
def _scorer(folder: str) -> _Scorer:
    """Loaded once in each process."""
    return _Scorer(Path(folder))
