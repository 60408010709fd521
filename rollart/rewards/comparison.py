"""Compares a remote reward with the same function here, on recorded episodes of a run."""

import asyncio
import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rollart.core.errors import RewardFailed
from rollart.core.protocols import RewardInvoker
from rollart.core.types import Episode, EpisodeTurn, Outcome, RewardResult, Trajectory
from rollart.rewards.runtime import RewardFunction, call, error_sentence
from rollart.rollout.ledger import SqliteLedger


@dataclass(frozen=True, slots=True)
class Comparison:
    """One episode; a failure is its text. `same` if both sides failed, or agree."""

    episode: str
    here: RewardResult | str
    there: RewardResult | str

    @property
    def same(self) -> bool:
        if isinstance(self.here, str) or isinstance(self.there, str):
            return isinstance(self.here, str) and isinstance(self.there, str)
        return (
            _close(self.here.value, self.there.value)
            and self.here.success == self.there.success
            and self.here.parts.keys() == self.there.parts.keys()
            and all(_close(value, self.there.parts[name]) for name, value in self.here.parts.items())
        )


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def episode_of(trajectory: Trajectory) -> Episode:
    """The episode as the reward function gets it."""
    turns = tuple(EpisodeTurn(turn.messages, turn.action, turn.reward, turn.reasoning) for turn in trajectory.turns)
    truncated = trajectory.outcome is Outcome.TRUNCATED
    return Episode(
        id=trajectory.id,
        task=trajectory.task,
        seed=trajectory.seed,
        turns=turns,
        truncated=truncated,
        info=trajectory.info,
    )


def recorded_episodes(run_dir: Path, limit: int, tasks: Iterable[str] = ()) -> list[Episode]:
    """The last `limit` episodes of a run that were scored, or whose reward failed. Raises RollartError."""
    with closing(SqliteLedger.open_readonly(run_dir / "ledger.sqlite")) as ledger:
        return [episode_of(trajectory) for trajectory in ledger.scored(limit, tuple(tasks))]


async def compare(
    function: RewardFunction, args: dict[str, object], invoker: RewardInvoker, task: str, episodes: Sequence[Episode]
) -> list[Comparison]:
    async def there(episode: Episode) -> RewardResult | str:
        try:
            return await invoker.score(task, episode)
        except RewardFailed as error:
            return str(error)

    remote = await asyncio.gather(*(there(episode) for episode in episodes))
    return [
        Comparison(episode.id, here(function, args, episode), result)
        for episode, result in zip(episodes, remote, strict=True)
    ]


def here(function: RewardFunction, args: dict[str, object], episode: Episode) -> RewardResult | str:
    try:
        return call(function, [episode], args)[0]
    except Exception as error:  # the user's code may raise anything; the comparison shows it
        return error_sentence(error)
