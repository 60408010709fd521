"""From a batch to the advantage of every action token: shaped rewards, an estimator, and what is done to its values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollart.config import AlgorithmConfig
from rollart.core.errors import RollartError
from rollart.core.types import Batch, Sample, SampleGroup, TurnSpan
from rollart.training.advantages.base import (
    EPSILON,
    Advantage,
    PlayedTokens,
    PlayedTurns,
    RewardRange,
    critic_estimators,
    reward_units,
    teacher_estimators,
    token_estimators,
    turn_estimators,
)
from rollart.training.advantages.tokens import value_targets

TokenAdvantages = list[list[NDArray[np.float32]]]
Numbers = NDArray[np.float64]
Floats = NDArray[np.float32] | Numbers
CriticValues = Sequence[Sequence[NDArray[np.float32]]]  # for each group and sample, one value per action token


@dataclass(frozen=True, slots=True)
class Assessed:
    """What a critic said before each action token, and what it should say; not a number where it is not asked."""

    values: CriticValues
    targets: CriticValues

    def of(self, groups: Sequence[int]) -> "Assessed":
        return Assessed([self.values[i] for i in groups], [self.targets[i] for i in groups])


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

    @property
    def turns(self) -> list[TurnSpan]:
        return [turn for _, turn in self._placed() if turn is not None]

    def _placed(self) -> list[tuple[str, TurnSpan | None]]:
        """Turn after turn, with the sample that has it. A sample without turns is one."""
        placed: list[tuple[str, TurnSpan | None]] = []
        for sample in self.samples:
            placed += [(sample.id, turn) for turn in sample.turns] or [(sample.id, None)]
        return sorted(placed, key=lambda one: -1 if one[1] is None else one[1].number)

    def played(self, reward: float) -> PlayedTurns:
        turns = self.turns
        rewards = [turn.reward for turn in turns]
        if rewards:
            rewards[-1] += reward - sum(rewards)
        return PlayedTurns(tuple(turns), tuple(rewards))

    def places(self) -> list[tuple[str, int, int]]:
        """Turn after turn, the sample and which of its action tokens."""
        actions = {sample.id: sample.actions for sample in self.samples}
        at, found = dict.fromkeys(actions, 0), []
        for name, turn in self._placed():
            length = actions[name] if turn is None else turn.stop - turn.start
            found.append((name, at[name], at[name] + length))
            at[name] += length
        return found

    def played_tokens(self, reward: float, values: Mapping[str, Floats] | None) -> PlayedTokens:
        """`values` are the critic's, by sample."""
        places = self.places()

        def joined(columns: Mapping[str, Floats]) -> Numbers:
            return np.concatenate([columns[name][start:stop] for name, start, stop in places]).astype(np.float64)

        lengths = tuple(stop - start for _, start, stop in places)
        teachers = {one.id: one.teacher.logprobs.array for one in self.samples if one.teacher is not None}
        return PlayedTokens(
            lengths,
            self.played(reward).rewards or (reward, *[0.0] * (len(lengths) - 1)),
            joined({one.id: one.logprobs.array for one in self.samples}),
            None if values is None else joined(values),
            joined(teachers) if len(teachers) == len(self.samples) else None,
        )


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


Values = list[list[Numbers]]  # of each member of each group: one value, or one for each turn or action token


def _estimated(
    function: Advantage,
    groups: Sequence[Sequence[Member]],
    config: AlgorithmConfig,
    critic: Sequence[Mapping[str, Floats]],
) -> Values:
    shaped = [shaped_rewards(members, config) for members in groups]
    if function in token_estimators:
        tokens = [_played_tokens(*each) for each in zip(groups, shaped, critic, strict=True)]
        sizes, rows, what = [[len(one.logprobs) for one in each] for each in tokens], function(tokens, config), "token"
    elif function in turn_estimators:
        turns = [[*map(Member.played, members, rewards)] for members, rewards in zip(groups, shaped, strict=True)]
        sizes, rows, what = [[len(one.turns) for one in each] for each in turns], function(turns, config), "turn"
    else:
        rows = [[[value] for value in group] for group in function(shaped)]
        sizes, what = [[1] * len(group) for group in shaped], "reward of each group"
    _check([[len(row) for row in group] for group in rows], sizes, function, what)
    return [[np.array(row, np.float64) for row in group] for group in rows]


def _played_tokens(
    members: Sequence[Member], rewards: Sequence[float], critic: Mapping[str, Floats]
) -> list[PlayedTokens]:
    return [member.played_tokens(reward, critic or None) for member, reward in zip(members, rewards, strict=True)]


def _by_sample(batch: Batch, critic: CriticValues | None) -> list[dict[str, Floats]]:
    """The values of each group, by sample; empty without a critic."""
    rows = critic if critic is not None else [()] * len(batch.groups)
    return [
        {s.id: row for s, row in zip(g.samples, of, strict=False)} for g, of in zip(batch.groups, rows, strict=True)
    ]


def token_advantages(
    function: Advantage,
    batch: Batch,
    ranges: Sequence[RewardRange],
    config: AlgorithmConfig,
    critic: CriticValues | None = None,
) -> tuple[TokenAdvantages, list[bool]]:
    """The advantage of every action token of every sample, and which groups are solved. `critic` has its values, if the
    estimator needs them."""
    if function in critic_estimators and critic is None:
        raise RollartError(f"the advantage {config.advantage!r} needs the values of a critic")
    groups = [members_of(group) for group in batch.groups]
    raw = [[member.reward for member in members] for members in groups]
    judged = function not in teacher_estimators
    solved = [judged and seen.solved_by(rewards) for rewards, seen in zip(raw, ranges, strict=True)]
    values = _estimated(function, groups, config, _by_sample(batch, critic))
    values = _options(values, [group.task for group in batch.groups], config)
    for index, seen in enumerate(ranges):
        if solved[index]:
            floor = _floor(function, seen, config.solved_advantage)
            values[index] = [np.maximum(row, floor) for row in values[index]]
    if config.mask_truncated:
        values = [
            [0 * row if member.samples[0].truncated else row for member, row in zip(members, rows, strict=True)]
            for members, rows in zip(groups, values, strict=True)
        ]
    spread = [_over_tokens(*each, function) for each in zip(batch.groups, groups, values, strict=True)]
    if not judged:
        return spread, solved
    return [
        [_taught(sample, row, config) for sample, row in zip(group.samples, rows, strict=True)]
        for group, rows in zip(batch.groups, spread, strict=True)
    ], solved


def token_targets(batch: Batch, config: AlgorithmConfig, critic: CriticValues) -> TokenAdvantages:
    """What the critic should have said before every action token of every sample; NaN where it is not asked."""
    found = []
    for group, values in zip(batch.groups, _by_sample(batch, critic), strict=True):
        members = members_of(group)
        played = _played_tokens(members, shaped_rewards(members, config), values)
        rows = [value_targets(one, config) for one in played]
        found.append(_in_place(group, members, rows))
    return found


def _taught(sample: Sample, advantage: NDArray[np.float32], config: AlgorithmConfig) -> NDArray[np.float32]:
    """What the teacher adds: how much likelier it finds each token than the policy that sampled it, on average the
    gradient of the KL from the policy to the teacher."""
    if sample.teacher is None or (config.mask_truncated and sample.truncated):
        return advantage
    difference: NDArray[np.float32] = config.teacher_weight * (sample.teacher.logprobs.array - sample.logprobs.array)
    if (most := config.clip_advantage) is not None:
        difference = difference.clip(-most, most)
    return (advantage + difference).astype(np.float32)


def _over_tokens(
    group: SampleGroup, members: Sequence[Member], values: Sequence[Numbers], function: Advantage
) -> list[NDArray[np.float32]]:
    if function not in token_estimators:
        by_turn = function in turn_estimators
        values = [
            np.repeat(row, [turn.stop - turn.start for turn in member.turns] if by_turn else member.tokens)
            for member, row in zip(members, values, strict=True)
        ]
    return _in_place(group, members, values)


def _in_place(group: SampleGroup, members: Sequence[Member], rows: Sequence[Numbers]) -> list[NDArray[np.float32]]:
    """Rows of one value per action token of a member, turn after turn, in the order of the group's samples."""
    found = {sample.id: np.zeros(sample.actions, np.float32) for sample in group.samples}
    for member, row in zip(members, rows, strict=True):
        at = 0
        for name, start, stop in member.places():
            found[name][start:stop] = row[at : at + stop - start]
            at += stop - start
    return [found[sample.id] for sample in group.samples]


def _options(values: Values, tasks: Sequence[str], config: AlgorithmConfig) -> Values:
    """Whiten by scope, then clip."""
    if config.normalise != "none":
        scopes = {"group": range(len(tasks)), "batch": [0] * len(tasks), "task": tasks}[config.normalise]
        found: dict[object, list[Numbers]] = {}
        for scope, group in zip(scopes, values, strict=True):
            found.setdefault(scope, []).extend(group)
        known = {scope: np.concatenate(rows) for scope, rows in found.items()}
        values = [[_whitened(row, known[scope]) for row in group] for scope, group in zip(scopes, values, strict=True)]
    if (most := config.clip_advantage) is not None:
        values = [[row.clip(-most, most) for row in group] for group in values]
    return values


def _whitened(row: Numbers, among: Numbers) -> Numbers:
    deviation = among.std() if len(among) else 0.0
    # What is not finite stays so, for the trainer to see.
    return 0 * row if deviation < EPSILON else (row - among.mean()) / (deviation + EPSILON)


def spread_over_tokens(batch: Batch, scores: Sequence[Sequence[float]]) -> TokenAdvantages:
    """The advantage of each trajectory at all action tokens of its samples."""
    spread = []
    for group, row in zip(batch.groups, scores, strict=True):
        score = dict(zip(group.rewards, row, strict=True))
        spread.append([np.full(sample.actions, score[sample.owner], np.float32) for sample in group.samples])
    return spread
