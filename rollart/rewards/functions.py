"""Reward functions that ship with rollart. Each is a pure function of an episode."""

import re

from rollart.types import Episode, RewardResult

DIGITS = "[0-9]{1,18}"  # int() refuses very long numbers, and a policy may write them
STEP = re.compile(rf"(-?{DIGITS})([+-]{DIGITS})=(-?{DIGITS})")
NUMBER = re.compile(r"-?[0-9]+")


def env_return(episode: Episode) -> RewardResult:
    """What the environment gave, added up; success if the environment says so."""
    success = episode.info.get("success")
    return RewardResult(episode.env_return, success=success if isinstance(success, bool) else None)


def chain_sum(episode: Episode) -> RewardResult:
    """0.8 for the right last number, and 0.2 shared by the steps that are written, in order and right.

    A step is right if it starts from the result before it, takes the next term and adds it correctly. Steps beyond
    those the sum has take the place of right ones, so writing more cannot pay.
    """
    action = episode.turns[-1].action
    total, *terms = re.findall(r"[+-]?[0-9]+", str(episode.info["expression"]))
    steps = STEP.findall(action.replace(" ", ""))
    right = 0
    for (before, term, after), wanted in zip(steps, terms, strict=False):
        if before == total and int(term) == int(wanted) and int(before) + int(term) == int(after):
            right += 1
        total = after
    written = right / max(len(terms), len(steps))
    numbers = NUMBER.findall(action)
    answer = bool(numbers) and numbers[-1] == episode.info["answer"]
    parts = {"answer": float(answer), "steps": written}
    return RewardResult(0.8 * parts["answer"] + 0.2 * parts["steps"], parts=parts, success=answer)
