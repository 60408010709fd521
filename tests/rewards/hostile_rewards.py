"""Rewards that misbehave on demand. Imported by the host, not by pytest."""

import os
import time
from pathlib import Path

from rollart.core.types import RewardResult


def answer(episode):
    """What the episode's info asks for."""
    if episode.info["answer"] == "unreachable":
        raise ConnectionError("a judge cannot be reached")
    return episode.info["answer"]


def infinite(episode):
    return float("inf")


def whole(episode):
    return RewardResult(2, parts={"a": 1}, success=True)


def bad_part(episode):
    return RewardResult(1.0, parts={"a": "b"})


def bad_success(episode):
    return RewardResult(1.0, success="yes")


def hang(episode):
    time.sleep(3600)


def die(episode):
    os._exit(4)


def die_once(episode):
    marker = Path(episode.info["marker"])
    if not marker.exists():
        marker.touch()
        os._exit(4)
    return 1.0


def who(episode):
    return os.getpid()
