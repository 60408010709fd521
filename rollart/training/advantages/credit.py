"""From a batch to the advantage of every action token: shaped rewards, an estimator, and what is done to its values."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollart.config import AlgorithmConfig
from rollart.core.errors import RollartError
from rollart.core.types import Batch, Sample, SampleGroup
from rollart.training.advantages.base import (
    Advantage,
    PlayedTurns,
    RewardRange,
    reward_units,
    turn_estimators,
)
from rollart.training.advantages.groups import moments, normalised

TokenAdvantages = list[list[NDArray[np.float32]]]


@dataclass(frozen=True, slots=True)
class Member:
    """A trajectory of a group, and its segments."""

    samples: tuple[Sample, ...]

    @property
    def reward(self) -> float:
        return self.samples[0].reward

    @property
    def tokens(self) -> int:
        return sum(sample.actions for sample in self.samples)

    def played(self, reward: float) -> PlayedTurns:
        turns = sorted((turn for sample in self.samples for turn in sample.turns), key=lambda turn: turn.number)
        rewards = [turn.reward for turn in turns]
        if rewards:
            rewards[-1] += reward - sum(rewards)
        return PlayedTurns(tuple(turns), tuple(rewards))


def members_of(group: SampleGroup) -> list[Member]:
    found: dict[str, list[Sample]] = {}
    for sample in group.samples:
        found.setdefault(sample.owner, []).append(sample)
    return [Member(tuple(samples)) for samples in found.values()]


def shaped_rewards(members: Sequence[Member], config: AlgorithmConfig) -> list[float]:
    """Rewards less what length costs.

    `length_penalty` is spread by length within the group, from half of it given to the shortest to half of it taken
    from the longest; an answer below the group's best reward is given nothing, so that being short never pays for being
    wrong. `overlong_tokens` takes up to 1 from what is longer.
    """
    lengths = [member.tokens for member in members]
    shortest, longest = min(lengths), max(lengths)
    best = max(member.reward for member in members)
    rewards = []
    for member, length in zip(members, lengths, strict=True):
        reward = member.reward
        if config.length_penalty and longest > shortest:
            bonus = 0.5 - (length - shortest) / (longest - shortest)
            reward += config.length_penalty * (bonus if member.reward == best else min(0.0, bonus))
        if config.overlong_tokens:
            reward -= min(1.0, max(0.0, (length - config.overlong_tokens) / config.overlong_buffer))
        rewards.append(reward)
    return rewards


def _floor(function: Advantage, seen: RewardRange, solved_advantage: float) -> float:
    return solved_advantage * (seen.high - seen.low if function in reward_units else 1.0)


def _check(got: object, expected: object, function: Advantage, what: str) -> None:
    if got != expected:
        name = getattr(function, "__name__", function)
        raise RollartError(f"the advantage {name!r} must return one number for each {what}")


def token_advantages(
    function: Advantage, batch: Batch, ranges: Sequence[RewardRange], config: AlgorithmConfig
) -> tuple[TokenAdvantages, list[bool]]:
    """The advantage of every action token of every sample, and which groups are solved."""
    groups = [members_of(group) for group in batch.groups]
    raw = [[member.reward for member in members] for members in groups]
    shaped = [shaped_rewards(members, config) for members in groups]
    solved = [seen.solved_by(rewards) for rewards, seen in zip(raw, ranges, strict=True)]
    by_turn = function in turn_estimators
    if by_turn:
        played = [
            [member.played(reward) for member, reward in zip(members, rewards, strict=True)]
            for members, rewards in zip(groups, shaped, strict=True)
        ]
        values = [[list(row) for row in group] for group in function(played, config)]
        sizes = [[len(row) for row in group] for group in values]
        _check(sizes, [[len(one.turns) for one in group] for group in played], function, "turn")
    else:
        flat = [list(group) for group in function(shaped)]
        _check([len(group) for group in flat], [len(group) for group in shaped], function, "reward of each group")
        values = [[[value] for value in group] for group in flat]
    values = _options(values, [group.task for group in batch.groups], config)
    for index, seen in enumerate(ranges):
        if solved[index]:
            floor = _floor(function, seen, config.solved_advantage)
            values[index] = [[max(value, floor) for value in row] for row in values[index]]
    if config.mask_truncated:
        values = [
            [
                [0.0] * len(row) if member.samples[0].truncated else row
                for member, row in zip(members, rows, strict=True)
            ]
            for members, rows in zip(groups, values, strict=True)
        ]
    return [
        _over_tokens(group, m, v, by_turn) for group, m, v in zip(batch.groups, groups, values, strict=True)
    ], solved


def _over_tokens(
    group: SampleGroup, members: Sequence[Member], values: Sequence[Sequence[float]], by_turn: bool
) -> list[NDArray[np.float32]]:
    """In the order of the group's samples."""
    found = {}
    for member, row in zip(members, values, strict=True):
        order = {number: at for at, number in enumerate(sorted(t.number for s in member.samples for t in s.turns))}
        for sample in member.samples:
            if by_turn:
                spans = [np.full(t.stop - t.start, row[order[t.number]], np.float32) for t in sample.turns]
                found[sample.id] = np.concatenate([*spans, np.zeros(0, np.float32)])
            else:
                found[sample.id] = np.full(sample.actions, row[0], np.float32)
    return [found[sample.id] for sample in group.samples]


Values = list[list[list[float]]]


def _options(values: Values, tasks: Sequence[str], config: AlgorithmConfig) -> Values:
    """Whiten by scope, then clip."""
    if config.normalise != "none":
        scopes = {"group": range(len(tasks)), "batch": [0] * len(tasks), "task": tasks}[config.normalise]
        found: dict[object, list[float]] = {}
        for scope, group in zip(scopes, values, strict=True):
            found.setdefault(scope, []).extend(_flat(group))
        known = {scope: moments(all_of_it) for scope, all_of_it in found.items() if all_of_it}
        values = [
            [normalised(row, *known[scope]) if row else row for row in group]
            for scope, group in zip(scopes, values, strict=True)
        ]
    if (most := config.clip_advantage) is not None:
        values = [[[min(most, max(-most, value)) for value in row] for row in group] for group in values]
    return values


def _flat(group: Iterable[Iterable[float]]) -> list[float]:
    return [value for row in group for value in row]


def spread_over_tokens(batch: Batch, scores: Sequence[Sequence[float]]) -> TokenAdvantages:
    """The advantage of each trajectory at all action tokens of its samples."""
    spread = []
    for group, row in zip(batch.groups, scores, strict=True):
        score = dict(zip(group.rewards, row, strict=True))
        spread.append([np.full(sample.actions, score[sample.owner], np.float32) for sample in group.samples])
    return spread
