"""Metrics of a step: sums over action tokens, and a row per task."""

from math import sqrt
from statistics import fmean

import torch
from torch import Tensor

from rollart.core.types import Batch, SampleGroup
from rollart.training.experts import ExpertLoad
from rollart.training.logprob_gap import Cells, GapTotals
from rollart.training.microbatch import MicroBatch
from rollart.training.ranks import Ranks

SPREAD = 1e-6
PER_PASS = ("clip_fraction", "kl")
PER_TOKEN = ("entropy", "logprob_gap", "importance", "stale_kl", "over_cap", "dropped")
BY_CELL = ("action_tokens", "entropy", "passes", *PER_PASS, "kl_tokens", "loss", "squared_slopes")
RATIOS = ("ratio", "ratio_squared")
PER_PAIR = ("pair_accuracy", "pair_margin")
PAIRS = ("pairs", *PER_PAIR)


class CellTotals:
    """Sums over the tokens of each logprob-gap cell, on the device: no pass waits for them."""

    def __init__(self, cells: int, device: torch.device | None) -> None:
        self._sums = {name: torch.zeros(cells, dtype=torch.float64, device=device) for name in BY_CELL}

    def add(self, name: str, cell: Tensor, values: Tensor) -> None:
        self._sums[name].index_add_(0, cell, values.detach().double())

    def merge(self, ranks: Ranks) -> None:
        whole = torch.tensor(ranks.all_reduce(torch.cat([*self._sums.values()]).tolist()), dtype=torch.float64)
        self._sums = dict(zip(self._sums, whole.chunk(len(BY_CELL)), strict=True)) if len(whole) else self._sums

    def of(self, numbers: list[int] | None = None) -> dict[str, float]:
        """Over some cells, or all of them."""
        return {name: float((sums if numbers is None else sums[numbers]).sum()) for name, sums in self._sums.items()}


class StepTotals:
    """Sums over the trained tokens, without those of samples whose advantage is 0. `gaps` and `by_cell` have them by
    cell."""

    def __init__(self, cells: int = 0, device: torch.device | None = None) -> None:
        self.skipped = False
        self.value_loss: float | None = None  # of a critic, on all ranks
        self.gaps, self.by_cell = GapTotals(cells, device), CellTotals(cells, device)
        names = (*PER_TOKEN[1:], *RATIOS, "expert_tokens", "experts_replayed", *PAIRS)
        self._sums = dict.fromkeys(names, 0.0)
        self._updates: list[tuple[float, float, float]] = []
        self._experts: Tensor | None = None  # the sums of `ExpertLoad`

    def add_pass(self, cell: Tensor, loss: Tensor, clipped: Tensor, kl: Tensor | None) -> None:
        self.by_cell.add("passes", cell, torch.ones_like(loss))
        self.by_cell.add("loss", cell, loss)
        self.by_cell.add("clip_fraction", cell, clipped)
        if kl is not None:
            self.by_cell.add("kl", cell, kl)
            self.by_cell.add("kl_tokens", cell, torch.ones_like(kl))

    def add_slopes(self, slopes: Tensor | None, micro: MicroBatch) -> None:
        """The gradient of the loss with respect to the logprob of each trained token, after the backward pass."""
        if slopes is not None:
            self.by_cell.add("squared_slopes", micro.of_sampled(micro.cell), micro.of_sampled(slopes).double() ** 2)

    def add_stale(self, stale: dict[str, Tensor]) -> None:
        """What corrections found before the first update (`corrections.measure`)."""
        for name, values in stale.items():
            self._add(name, values)

    def add_first_pass(self, entropy: Tensor, micro: MicroBatch) -> None:
        """Before the first update, of the tokens that were sampled: entropy, and the gap between engine and trainer."""
        assert micro.proximal is not None
        columns = (entropy.detach(), micro.proximal, micro.behaviour, micro.cell)
        entropy, proximal, behaviour, cell = map(micro.of_sampled, columns)
        gap = behaviour - proximal
        self.by_cell.add("action_tokens", cell, torch.ones_like(entropy))
        self.by_cell.add("entropy", cell, entropy)
        self._add("logprob_gap", gap.abs())
        self.gaps.add(cell, gap, proximal + entropy)

    def add_pairs(self, margins: Tensor) -> None:
        """By how much the chosen sequence of each pair is preferred."""
        self._sums["pairs"] += len(margins)
        self._add("pair_accuracy", (margins.sign() + 1) / 2)  # a tie is half right
        self._add("pair_margin", margins)

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
        self.by_cell.merge(ranks)
        if self._experts is not None:
            self._experts = torch.tensor(ranks.all_reduce(self._experts.flatten().tolist())).view_as(self._experts)

    def values(self) -> dict[str, float]:
        """`skipped` is 1 if the weights were left alone because the loss or the gradient was not finite. Of stale
        tokens: `importance` is the mean factor of their loss, `dropped` the share with factor 0, `stale_kl` the
        estimated KL to the policy that sampled, `over_cap` the share of weights above the cap, and `effective_samples`
        the effective sample size of the uncapped weights, as a share of the tokens. `logprob_grad` is the norm of the
        gradient with respect to the logprobs of the trained tokens."""
        whole = self.by_cell.of()
        sums = self._sums | {name: whole[name] for name in ("action_tokens", "entropy", "passes", *PER_PASS)}
        loss, norm, rate = (fmean(column) for column in zip(*self._updates or [(0.0, 0.0, 0.0)], strict=True))
        return {
            "loss": loss,
            "grad_norm": norm,
            "lr": rate,
            "logprob_grad": self._norm(whole),
            **{name: sums[name] / max(1, sums["passes"]) for name in PER_PASS},
            **{name: sums[name] / max(1, sums["action_tokens"]) for name in PER_TOKEN},
            "effective_samples": sums["ratio"] ** 2 / max(1e-9, sums["ratio_squared"] * sums["action_tokens"]),
            "action_tokens": sums["action_tokens"],
            "updates": float(len(self._updates) - self.skipped),
            "skipped": float(self.skipped),
            **({name: sums[name] / sums["pairs"] for name in PER_PAIR} if sums["pairs"] else {}),
            **({} if self.value_loss is None else {"value_loss": self.value_loss}),
            **self._expert_values(),
        }

    def of_tasks(self, cells: Cells) -> dict[str, dict[str, float]]:
        """Of each task with trained tokens. Losses add up to that of the batch; the squares of `logprob_grad` to its
        square: which task moves the policy. `kl` only of those that have a term for it."""
        rows = {}
        for task, numbers in cells.by_task().items():
            sums = self.by_cell.of(numbers)
            if not sums["action_tokens"]:
                continue
            rows[task] = {
                "loss": sums["loss"] / max(1, len(self._updates)),
                "logprob_grad": self._norm(sums),
                "entropy": sums["entropy"] / sums["action_tokens"],
                "clip_fraction": sums["clip_fraction"] / max(1, sums["passes"]),
                **({"kl": sums["kl"] / sums["kl_tokens"]} if sums["kl_tokens"] else {}),
            }
        return rows

    def _norm(self, sums: dict[str, float]) -> float:
        """Of the mean update."""
        return sqrt(sums["squared_slopes"] / max(1, len(self._updates)))

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


def task_metrics(batch: Batch, solved: list[bool], learnt: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """`spread` and `solved` are shares of groups; `staleness` is the mean age, in versions, of the oldest token.
    `learnt` is what the passes measured (`StepTotals.of_tasks`)."""
    rows: dict[str, list[tuple[SampleGroup, bool]]] = {}
    for group, flag in zip(batch.groups, solved, strict=True):
        rows.setdefault(group.task, []).append((group, flag))
    return {task: _task_row(batch.step, members) | learnt.get(task, {}) for task, members in rows.items()}


def _task_row(step: int, members: list[tuple[SampleGroup, bool]]) -> dict[str, float]:
    samples = [sample for group, _ in members for sample in group.samples]
    rewards = [list(group.rewards.values()) for group, _ in members]
    ages = [step - int(sample.versions.array.min()) for sample in samples if sample.actions]
    return {
        "reward": fmean(reward for group in rewards for reward in group),
        "spread": fmean(max(group) - min(group) > SPREAD for group in rewards),
        "solved": fmean(flag for _, flag in members),
        "staleness": fmean(ages) if ages else 0.0,
        "truncated": fmean(sample.truncated for sample in samples),
        "samples": float(len(samples)),
        "action_tokens": float(sum(sample.actions for sample in samples)),
    }
