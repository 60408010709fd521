"""The algorithms of a run: that of `training.algorithm`, and those of tasks that have one of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollart.config import AlgorithmConfig
from rollart.training.advantages import ADVANTAGES, Advantage, critic_estimators
from rollart.training.corrections import Correction, find
from rollart.training.losses import LOSSES, Loss, Traits


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Functions and settings of one. Made by `of`."""

    config: AlgorithmConfig
    advantage: Advantage
    loss: Loss
    corrections: list[Correction]

    @classmethod
    def of(cls, config: AlgorithmConfig) -> Algorithm:
        """Raises ConfigError if it names something that does not exist."""
        loss = LOSSES.find(config.loss)
        found = find(config.correction, one_ratio_per_sequence=loss in Traits.one_ratio_per_sequence)
        corrections = [] if loss in Traits.corrects_itself else found
        return cls(config, ADVANTAGES.find(config.advantage), loss, corrections)

    @property
    def needs_critic(self) -> bool:
        return self.advantage in critic_estimators

    @property
    def needs_reference(self) -> bool:
        return self.config.kl > 0 or self.loss in Traits.needs_reference

    @property
    def of_teacher(self) -> bool:
        """Whether its loss compares with a teacher, which says something of every group."""
        return self.loss in Traits.needs_teacher

    @property
    def keeps_all(self) -> bool:
        """Whether samples whose advantages are all 0 are trained too."""
        config = self.config
        return self.needs_critic or config.kl > 0 or config.entropy > 0 or self.loss in Traits.every_sample


class Algorithms:
    """Numbered from 0, the one of the run; the same on all ranks."""

    def __init__(self, config: AlgorithmConfig, tasks: Mapping[str, AlgorithmConfig] | None = None) -> None:
        configs = [config]
        self._numbers: dict[str, int] = {}
        for task, own in (tasks or {}).items():
            if own not in configs:
                configs.append(own)
            self._numbers[task] = configs.index(own)
        self.all = [Algorithm.of(each) for each in configs]

    def number(self, task: str) -> int:
        return self._numbers.get(task, 0)

    def of(self, task: str) -> Algorithm:
        return self.all[self.number(task)]

    @property
    def needs_critic(self) -> bool:
        return any(each.needs_critic for each in self.all)

    @property
    def needs_reference(self) -> bool:
        return any(each.needs_reference for each in self.all)

    @property
    def of_pairs(self) -> bool:
        """Whether batches are of pairs, which all tasks then are."""
        return self.all[0].loss in Traits.of_pairs

    @property
    def of_scores(self) -> bool:
        """Whether a reward model is trained in place of a policy."""
        return self.all[0].loss in Traits.of_scores
