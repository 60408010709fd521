"""Hostile values at the gate, ten thousand for each kind of foreign code: what passes can be stored and logged."""

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.fault_injection import hostile_text, invalid_reply
from rollart.agents.function import outcome
from rollart.core.foreign import InvalidValue, Verdict, is_bug, parse_verdict, storable
from rollart.core.types import Outcome, RewardResult, Trajectory
from rollart.envs.replies import parse_observation, parse_step
from rollart.rewards.wire import checked, received
from rollart.rollout.ledger import SqliteLedger
from rollart.sandbox.reward_file import parse_reward

COUNT = 10_000
ATOMS = (
    *(None, True, False, 0, 1, -1, 2**63, 2**64, -(2**63) - 1, 10**400, -(10**5000), 1e308, 5e-324),
    *(float("nan"), float("inf"), -float("inf"), "", "1", "\ud800", "x\x00y", b"1", 1j, object(), print, {1}, range(3)),
)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def deep(rng: random.Random) -> Any:
    value: Any = rng.choice((1, "x", 2**70))
    for _ in range(rng.choice((5, 31, 32, 33, 900, 5000))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def cyclic(rng: random.Random) -> Any:
    """Many references to itself: without a limit, a walk would never end."""
    value: dict[str, Any] = {}
    value |= {str(n): [value] * rng.randrange(1, 20) for n in range(rng.randrange(1, 20))}
    return value


def hostile(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.35:
        return rng.choice((*ATOMS, Unprintable()))
    if kind < 0.5:
        return hostile_text(rng)[:10_000]
    if kind < 0.55:
        return rng.choice((deep, cyclic, invalid_reply))(rng)
    if kind < 0.7:
        return [hostile(rng, depth - 1) for _ in range(rng.randrange(6))]
    names = ["reward", "success", "info", "value", "parts", "messages", "done", "truncated", "role", "content", "x", 1]
    return {rng.choice(names): hostile(rng, depth - 1) for _ in range(rng.randrange(6))}


def shaped(*names: str) -> Callable[[random.Random], Any]:
    """A dict with the right names, some with hostile values."""
    right: dict[str, Any] = {"reward": 0.5, "value": 1.0, "success": True, "info": {}, "parts": {}, "done": False}
    right |= {"messages": "go on", "truncated": False}

    def make(rng: random.Random) -> Any:
        if rng.random() < 0.2:
            return hostile(rng)
        return {name: hostile(rng) if rng.random() < 0.3 else right[name] for name in names}

    return make


def as_result(value: Any) -> RewardResult:
    return received(value) if isinstance(value, dict) else checked(value)


def of_file(value: Any) -> dict[str, Any]:
    """As a program would write it, with whatever Python's own encoder lets through."""
    try:
        text = json.dumps(value, default=lambda other: "other")
    except (ValueError, TypeError, RecursionError):
        text = "[" * 100_000
    return parse_reward(text, "reward.json")


GATES: dict[str, tuple[Callable[[Any], Any], Callable[[random.Random], Any]]] = {
    "observation": (parse_observation, lambda rng: hostile(rng)),
    "step": (parse_step, shaped("messages", "reward", "done", "truncated", "info")),
    "agent": (parse_verdict, shaped("reward", "success", "info")),
    "reward": (as_result, shaped("value", "parts", "success")),
    "verdict file": (of_file, shaped("reward", "success", "info")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GATES)
def test_ten_thousand_hostile_answers_pass_as_values_that_can_be_kept_or_are_refused_with_a_reason(name: str) -> None:
    gate, make = GATES[name]
    rng, passed, refused = random.Random(f"gate {name}"), 0, 0
    for _ in range(COUNT):
        try:
            value = gate(make(rng))
        except InvalidValue as error:
            refused += 1
            assert 0 < len(str(error).encode()) < 2000
        else:
            passed += 1
            plain = asdict(value) if hasattr(value, "__dataclass_fields__") else value
            msgspec.msgpack.encode(plain)
            msgspec.json.encode(plain)
            info = plain.get("info", {}) if isinstance(plain, dict) else {}
            json.dumps(info, allow_nan=False).encode()
    assert passed > COUNT // 100
    assert refused > COUNT // 10 or name == "verdict file"


def test_what_passes_can_be_written_to_the_ledger(tmp_path: Path) -> None:
    ledger = SqliteLedger.open(tmp_path / "ledger.sqlite")
    rng, make = random.Random(3), shaped("reward", "success", "info")
    for number in range(300):
        try:
            verdict = parse_verdict(make(rng))
        except InvalidValue:
            continue
        ledger.add(
            Trajectory(
                id=f"a.{number}",
                task="a",
                group="a",
                member=number,
                seed=0,
                outcome=Outcome.FINISHED,
                reward=verdict.reward,
                success=verdict.success,
                info=verdict.info,
            )
        )


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (None, Verdict()),
        (True, Verdict(1.0, True)),
        (2, Verdict(2.0)),
        ({"reward": 1, "success": False, "info": {"a": 1}}, Verdict(1.0, False, {"a": 1})),
        ({"reward": 1, "letters": 3}, Verdict(1.0, None, {"letters": 3})),  # extra keys are info
    ],
)
def test_a_verdict_is_nothing_a_number_or_a_dict(value: Any, verdict: Verdict) -> None:
    assert parse_verdict(value) == verdict
    assert outcome(value) == asdict(verdict)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("1", "`reward` is '1' (str); expected a number"),
        ({"reward": 1, "info": "text"}, "`info` is 'text' (str); expected a dict"),
        ({"reward": 1, "seed": 2**64}, "`info` has an integer of more than 64 bits"),
        ({"reward": 10**400}, "`reward` is not finite; expected a finite number"),
        ({"reward": 1, "success": "yes"}, "`success` is 'yes' (str); expected true, false or None"),
    ],
)
def test_the_reason_says_what_was_returned_and_what_is_expected(value: Any, reason: str) -> None:
    with pytest.raises(InvalidValue) as error:
        parse_verdict(value)
    assert str(error.value) == reason


def test_a_value_may_have_thirty_two_levels_and_no_more() -> None:
    value: Any = 1
    for _ in range(32):
        value = {"a": value}
    assert storable("`info`", value) is value
    with pytest.raises(InvalidValue, match="deeper than 32 levels"):
        storable("`info`", {"a": value})


def test_errors_of_code_are_bugs_and_those_of_the_world_are_not() -> None:
    def classes_of(error: Exception) -> list[str]:
        return [each.__name__ for each in type(error).__mro__]

    bugs = (KeyError("a"), TypeError(), ZeroDivisionError(), AssertionError(), UnicodeError())
    others = (OSError(), TimeoutError(), ConnectionError(), RuntimeError(), json.JSONDecodeError("x", "y", 0))
    assert all(is_bug(classes_of(error)) for error in bugs)
    assert not any(is_bug(classes_of(error)) for error in others)
    assert not is_bug(None) and not is_bug([[]])
