"""Metrics of a step: sums over action tokens, and a row per task."""

from statistics import fmean

import torch
from torch import Tensor

from rollart.core.types import Batch, SampleGroup
from rollart.training.experts import ExpertLoad
from rollart.training.logprob_gap import GapTotals
from rollart.training.ranks import Ranks

SPREAD = 1e-6
PER_PASS = ("clip_fraction", "kl")
PER_TOKEN = ("entropy", "logprob_gap", "importance")


class StepTotals:
    """Sums over the trained tokens, without those of samples whose advantage is 0; `gaps` has them by cell."""

    def __init__(self, cells: int = 0, device: torch.device | None = None) -> None:
        self.skipped = False
        self.gaps = GapTotals(cells, device)
        names = ("passes", *PER_PASS, "action_tokens", *PER_TOKEN, "expert_tokens", "experts_replayed")
        self._sums = dict.fromkeys(names, 0.0)
        self._updates: list[tuple[float, float, float]] = []
        self._experts: Tensor | None = None  # the sums of `ExpertLoad`

    def add_pass(self, clipped: Tensor, kl: Tensor | None) -> None:
        self._sums["passes"] += len(clipped)
        self._add("clip_fraction", clipped)
        if kl is not None:
            self._add("kl", kl)

    def add_first_pass(
        self, entropy: Tensor, proximal: Tensor, behaviour: Tensor, cell: Tensor, importance: Tensor
    ) -> None:
        """Before the first update: entropy, and the gap between engine and trainer."""
        entropy, gap = entropy.detach(), behaviour - proximal
        self._sums["action_tokens"] += len(entropy)
        self._add("entropy", entropy)
        self._add("logprob_gap", gap.abs())
        self._add("importance", importance)
        self.gaps.add(cell, gap, proximal + entropy)

    def add_experts(self, load: ExpertLoad, *, empty: bool) -> None:
        """The load of experts by one micro-batch; one that is `empty` has some token, which does not count."""
        counts = 0 if empty else 1
        sums = counts * load.sums.double().cpu()
        self._experts = sums if self._experts is None else self._experts + sums
        self._sums["expert_tokens"] += counts * load.tokens
        self._sums["experts_replayed"] += counts * load.replayed

    def add_update(self, loss: float, norm: float, rate: float) -> None:
        """Loss and norm are those of all ranks."""
        self._updates.append((loss, norm, rate))

    def merge(self, ranks: Ranks) -> None:
        """Add up the tokens of all ranks."""
        self._sums = dict(zip(self._sums, ranks.all_reduce(list(self._sums.values())), strict=True))
        self.gaps.merge(ranks)
        if self._experts is not None:
            self._experts = torch.tensor(ranks.all_reduce(self._experts.flatten().tolist())).view_as(self._experts)

    def values(self) -> dict[str, float]:
        """`skipped` is 1 if the weights were left alone because the loss or the gradient was not finite."""
        sums = self._sums
        loss, norm, rate = (fmean(column) for column in zip(*self._updates or [(0.0, 0.0, 0.0)], strict=True))
        return {
            "loss": loss,
            "grad_norm": norm,
            "lr": rate,
            **{name: sums[name] / max(1, sums["passes"]) for name in PER_PASS},
            **{name: sums[name] / max(1, sums["action_tokens"]) for name in PER_TOKEN},
            "action_tokens": sums["action_tokens"],
            "updates": float(len(self._updates) - self.skipped),
            "skipped": float(self.skipped),
            **self._expert_values(),
        }

    def _expert_values(self) -> dict[str, float]:
        """Of a mixture: the load of the busiest expert over the mean, averaged over layers; the share that no
        token used; the balance loss, 1 if the load is even; the share of tokens whose experts were replayed."""
        if self._experts is None:
            return {}
        used, likely = self._experts
        mean, tokens = used.mean(1, keepdim=True).clamp_min(1e-9), max(1.0, self._sums["expert_tokens"])
        return {
            "expert_load_max": float((used / mean).amax(1).mean()),
            "experts_unused": float((used == 0).double().mean()),
            "expert_balance": float((used / mean * likely / tokens).sum(1).mean()),
            "experts_replayed": self._sums["experts_replayed"] / tokens,
        }

    def _add(self, name: str, values: Tensor) -> None:
        self._sums[name] += values.detach().sum().item()


def task_metrics(batch: Batch, solved: list[bool]) -> dict[str, dict[str, float]]:
    """`spread` and `solved` are shares of groups; `staleness` is the mean age, in versions, of the oldest token."""
    rows: dict[str, list[tuple[SampleGroup, bool]]] = {}
    for group, flag in zip(batch.groups, solved, strict=True):
        rows.setdefault(group.task, []).append((group, flag))
    return {task: _task_row(batch.step, members) for task, members in rows.items()}


def _task_row(step: int, members: list[tuple[SampleGroup, bool]]) -> dict[str, float]:
    samples = [sample for group, _ in members for sample in group.samples]
    rewards = [list(group.rewards.values()) for group, _ in members]
    ages = [
        step - min(version for version, bit in zip(sample.versions, sample.mask, strict=True) if bit)
        for sample in samples
        if any(sample.mask)
    ]
    return {
        "reward": fmean(reward for group in rewards for reward in group),
        "spread": fmean(max(group) - min(group) > SPREAD for group in rewards),
        "solved": fmean(flag for _, flag in members),
        "staleness": fmean(ages) if ages else 0.0,
        "samples": float(len(samples)),
        "action_tokens": float(sum(sum(sample.mask) for sample in samples)),
    }
