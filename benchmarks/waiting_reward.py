"""Rewards of benchmarks: one that waits for something else, as judges and test runs do, and one without a task."""

import time

from rollart.core.types import Episode

SCORE_S = 0.05


def waits(episode: object) -> float:
    time.sleep(SCORE_S)
    return 1.0


def letters(episode: Episode) -> float:
    """The share of letters among what was said: even an untrained model gets some of it."""
    said = "".join(turn.action for turn in episode.turns)
    return sum(character.isalpha() for character in said) / max(1, len(said))
