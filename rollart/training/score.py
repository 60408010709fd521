"""Log-probabilities and entropies of given tokens, without ever keeping their logits.

The logits of a long micro-batch would take gigabytes, so the output head runs on a chunk of rows at a time, in both
passes; between them only one normaliser per row is kept. Under tensor parallelism each rank has the logits of its part
of the vocabulary, and ranks exchange a maximum and three sums per row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from rollart.hardware.training_memory import scorer_rows


@dataclass(frozen=True, slots=True)
class VocabularySplit:
    """The ranks that split the vocabulary, and the first token of this one's part."""

    group: distributed.ProcessGroup
    start: int


@dataclass(frozen=True, slots=True)
class _Head:
    weight: Tensor
    bias: Tensor | None
    split: VocabularySplit | None

    def logits(self, hidden: Tensor, temperature: Tensor | None) -> Tensor:
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias).float()
        return logits if temperature is None else logits.div_(temperature[:, None])

    def find(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The column of every target, and whether it is in this rank's part; others have some column."""
        columns = targets if self.split is None else targets - self.split.start
        here = (columns >= 0) & (columns < self.weight.shape[0])
        return columns.clamp(0, self.weight.shape[0] - 1)[:, None], here

    def reduce(self, values: Tensor, how: Any = distributed.ReduceOp.SUM) -> Tensor:
        if self.split is not None:
            distributed.all_reduce(values, how, group=self.split.group)
        return values


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        split: VocabularySplit | None,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(weight, bias, split)
        normaliser, chosen, entropy = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for rows in _chunks(len(hidden), len(weight)):
            logits = head.logits(hidden[rows], None if temperature is None else temperature[rows])
            columns, here = head.find(targets[rows])
            target = torch.where(here, logits.gather(1, columns)[:, 0], 0.0)
            top = head.reduce(logits.amax(-1), distributed.ReduceOp.MAX)
            weights = logits.sub_(top[:, None]).exp()
            mean = torch.einsum("rv,rv->r", weights, logits)  # of the logits less their maximum
            total, mean, target = head.reduce(torch.stack((weights.sum(-1), mean, target)))
            normaliser[rows], chosen[rows] = total.log() + top, target
            entropy[rows] = total.log() - mean / total
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, normaliser, entropy)
        ctx.split = split
        ctx.set_materialize_grads(False)
        return chosen - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, normaliser, entropy = ctx.saved_tensors
        to_logprob, _ = grads
        head = _Head(weight, bias, ctx.split)
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        for rows in _chunks(len(hidden), len(weight)):
            heat = None if temperature is None else temperature[rows]
            logprobs = head.logits(hidden[rows], heat).sub_(normaliser[rows, None])
            slope = _slope(logprobs, entropy[rows, None], *(g if g is None else g[rows, None] for g in grads))
            if to_logprob is not None:
                columns, here = head.find(targets[rows])
                slope.scatter_add_(1, columns, torch.where(here, to_logprob[rows], 0.0)[:, None])
            if heat is not None:
                slope /= heat[:, None]
            if to_bias is not None:
                to_bias += slope.sum(0)
            slope = slope.to(hidden.dtype)
            torch.mm(slope, weight, out=to_hidden[rows])
            if to_weight is not None and to_weight.dtype == slope.dtype:
                to_weight.addmm_(slope.T, hidden[rows])
            elif to_weight is not None:
                to_weight += slope.T @ hidden[rows]
        return (
            head.reduce(to_hidden),
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(weight.dtype),
            *(None, None, None),
        )


def _slope(logprobs: Tensor, entropy: Tensor, to_logprob: Tensor | None, to_entropy: Tensor | None) -> Tensor:
    """The gradient of the logits, but for the targets' own. In the memory of `logprobs`, if entropies have none."""
    if to_entropy is None:
        return logprobs.exp_().mul_(0.0 if to_logprob is None else -to_logprob)
    factor = (logprobs + entropy).mul_(-to_entropy)
    if to_logprob is not None:
        factor -= to_logprob
    return logprobs.exp_().mul_(factor)


def _chunks(rows: int, columns: int) -> list[slice]:
    size = scorer_rows(columns)
    return [slice(at, at + size) for at in range(0, rows, size)]


@torch.no_grad()
def likeliest(
    hidden: Tensor, weight: Tensor, targets: Tensor, count: int, *, bias: Tensor | None, temperature: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """For every row of `hidden`: the log-probability of its target, and ids and log-probabilities of the `count`
    likeliest tokens, [rows, count]. Without gradients."""
    head, parts = _Head(weight, bias, None), []
    for rows in _chunks(len(hidden), len(weight)) or [slice(0)]:
        logprobs = head.logits(hidden[rows], None if temperature is None else temperature[rows]).log_softmax(-1)
        top, ids = logprobs.topk(min(count, logprobs.shape[1]), -1)
        parts.append((logprobs.gather(1, targets[rows, None])[:, 0], ids, top))
    chosen, ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
    return chosen, ids, top


def score(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    split: VocabularySplit | None = None,
) -> tuple[Tensor, Tensor]:
    """For every row of `hidden`: the log-probability of its target, and the entropy of the distribution. Both are
    float32 and have gradients."""
    values: tuple[Tensor, Tensor] = _Score.apply(hidden, weight, bias, targets, temperature, split)  # type: ignore[no-untyped-call]
    return values
