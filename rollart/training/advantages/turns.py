"""One advantage per turn: what an action led to, rather than how its episode ended."""

from collections import defaultdict
from collections.abc import Iterable

from rollart.config import AlgorithmConfig
from rollart.training.advantages.base import ADVANTAGES, PlayedTurns, TurnGroups, of_turns
from rollart.training.advantages.groups import grpo, moments, normalised


def returns(rewards: Iterable[float], discount: float) -> list[float]:
    """G_k = r_k + discount G_{k+1}.

    >>> returns([0.0, 1.0, 2.0], 0.5)
    [1.0, 2.0, 2.0]
    """
    values, following = [], 0.0
    for reward in reversed([*rewards]):
        following = reward + discount * following
        values.append(following)
    return values[::-1]


@ADVANTAGES.register
@of_turns
def turn_returns(groups: TurnGroups, config: AlgorithmConfig) -> list[list[list[float]]]:
    """The discounted return from a turn on, against the mean of the group at that turn, in standard deviations of the
    group's returns. A turn that one member alone reached is compared with all turns of the group."""
    values = []
    for group in groups:
        rows = [returns(member.rewards, config.discount) for member in group]
        mean, deviation = moments([value for row in rows for value in row] or [0.0])
        at_turn = [[row[number] for row in rows if number < len(row)] for number in range(max(map(len, rows)))]
        base = [moments(column)[0] if len(column) > 1 else mean for column in at_turn]
        values.append([[*_scaled(row, base, deviation)] for row in rows])
    return values


def _scaled(row: list[float], base: list[float], deviation: float) -> Iterable[float]:
    for value, mean in zip(row, base, strict=False):
        yield from normalised([value], mean, deviation)


@ADVANTAGES.register
@of_turns
def gigpo(groups: TurnGroups, config: AlgorithmConfig) -> list[list[list[float]]]:
    """Group in group: the advantage of the episode, plus `step_weight` times that of the turn among all turns of the
    group that saw the same state. A state that was seen once adds nothing."""
    episodes = grpo([[sum(member.rewards) for member in group] for group in groups])
    values = []
    for group, whole in zip(groups, episodes, strict=True):
        steps = _among_equal_states(group, config.discount)
        values.append(
            [[one + config.step_weight * step for step in row] for one, row in zip(whole, steps, strict=True)]
        )
    return values


def _among_equal_states(group: Iterable[PlayedTurns], discount: float) -> list[list[float]]:
    seen: dict[str, list[float]] = defaultdict(list)
    rows = [[*zip((t.state for t in m.turns), returns(m.rewards, discount), strict=True)] for m in group]
    for row in rows:
        for state, value in row:
            seen[state].append(value)
    known = {state: moments(values) for state, values in seen.items()}
    return [[normalised([value], *known[state])[0] for state, value in row] for row in rows]
