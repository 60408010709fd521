"""Rewards that compare the answer of an episode with the right one, `episode.info["answer"]`: 1 or 0.

Each takes the last turn's text. `exact` and `number` need the standard library only; `math` needs math-verify.
"""

import re

from rollart.core.types import Episode, RewardResult

NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
BOXED = re.compile(r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
THOUGHT = re.compile(r"^.*</think>", re.DOTALL)


def exact(episode: Episode, *, pattern: str = "", ignore_case: bool = True) -> RewardResult:
    """The same text, but for white space, case and a full stop at the end. What is compared is the last match of
    `pattern` (its first group, if it has one); without a pattern, the text in `<answer>` tags or `\\boxed{}`, or all
    of it."""
    given, right = _stopless(final_text(episode, pattern)), _stopless(" ".join(str(episode.info["answer"]).split()))
    same = given.casefold() == right.casefold() if ignore_case else given == right
    return RewardResult(float(same), success=same)


def number(episode: Episode, *, tolerance: float = 1e-6) -> RewardResult:
    """The last number of the text equals the last number of the answer, which may be a worked solution."""
    given, right = last_number(final_text(episode)), last_number(str(episode.info["answer"]))
    if right is None:
        raise ValueError(f"the answer {str(episode.info['answer'])[:80]!r} has no number in it")
    same = given is not None and abs(given - right) <= tolerance * max(1.0, abs(right))
    return RewardResult(float(same), success=same)


def math(episode: Episode) -> RewardResult:
    """Equal as mathematics: fractions, sets, expressions and units, as math-verify parses them."""
    from math_verify import parse, verify

    right = str(episode.info["answer"])
    gold = parse(right if "$" in right or "\\" in right else f"${right}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the answer {right[:80]!r} is not mathematics that math-verify can parse")
    # Rewards have deadlines of their own, and math-verify's use signals, which only a main thread may.
    same = bool(verify(gold, parse(last_text(episode), parsing_timeout=None), timeout_seconds=None))
    return RewardResult(float(same), success=same)


def last_text(episode: Episode) -> str:
    """What the policy wrote last, without its reasoning.

    A reply that is all reasoning, because it was cut, has no answer in it."""
    text = episode.turns[-1].action if episode.turns else ""
    if "<think>" in text and "</think>" not in text:
        return ""
    return THOUGHT.sub("", text).strip()


def final_text(episode: Episode, pattern: str = "") -> str:
    text = last_text(episode)
    for each in (re.compile(pattern, re.DOTALL),) if pattern else (TAGGED, BOXED):
        if found := list(each.finditer(text)):
            return " ".join(found[-1][1 if each.groups else 0].split())
    return "" if pattern else " ".join(text.split())


def _stopless(text: str) -> str:
    return text.removesuffix(".") or text


def last_number(text: str) -> float | None:
    """
    >>> last_number("So 3 x $1,200.50 is #### 3,601.50")
    3601.5
    """
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("$", "")) if found else None
