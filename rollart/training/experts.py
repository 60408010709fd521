"""Experts in training: how evenly tokens use them, a loss for an uneven load, and the replay of the engine's choice.

An engine and the trainer compute with other kernels, and often in another precision, so for some tokens their gates
choose other experts; the logprobs of such tokens differ by much more than rounding does. With replay the trainer uses
the experts that the engine used, with weights computed again from its own logits, so gates have gradients all the same.
For tokens whose choice is not known the gate itself chooses.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from rollart.core.errors import RollartError
from rollart.models.expert_gates import ExpertGates
from rollart.training.context import ContextPeers
from rollart.training.packing import Packed


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Of one micro-batch: `sums` over tokens, [2, layers with experts, experts], are how often each expert was chosen,
    and its probability; `replayed` is the number of its `tokens` whose choice was replayed. `balance` is the mean over
    layers of the number of experts times the sum over experts of share of choices times mean probability: 1 if the load
    is even. It has gradients if the loss has a weight."""

    sums: Tensor
    balance: Tensor
    tokens: int
    replayed: int


class WatchedGates:
    """Hooks in the gates of a mixture. A rank sees the gates of its slice of each sequence; `load` is that of all ranks
    that share the micro-batch.

    Layers may run again in the backward pass: the hooks then do the same again, but do not count.
    """

    def __init__(self, gates: ExpertGates, *, context: ContextPeers | None, balanced: bool, replay: bool) -> None:
        self.load: ExpertLoad | None = None
        self._gates, self._context, self._balanced, self._replay = gates, context, balanced, replay
        self._wanted: Tensor | None = None
        self._tokens = 0
        self._counting = False
        self._used: list[Tensor] = []
        self._likely: list[Tensor] = []
        for layer, module in sorted(gates.modules.items()):
            module.register_forward_hook(partial(self._hook, layer))

    def begin(self, packed: Packed) -> None:
        """Before the forward pass of a micro-batch."""
        self._used, self._likely, self._counting = [], [], True
        total = packed.tokens.shape[1]
        start, size = (0, total) if self._context is None else self._context.slice_of(total)
        self._tokens = max(0, min(size, total - start))  # without padding
        wanted = packed.experts if self._replay else None
        if wanted is not None:
            expected = (self._gates.layers, self._gates.choices)
            if tuple(wanted.shape[1:]) != expected or int(wanted.max()) >= self._gates.experts:
                raise RollartError(f"the engine's expert choices do not fit the trainer's model, which has {expected}")
            wanted = functional.pad(wanted[start : start + size], (0, 0, 0, 0, 0, size - self._tokens), value=-1)
        self._wanted = wanted

    def end(self, packed: Packed) -> None:
        """After it."""
        self._counting = False
        used, likely = torch.stack(self._used), torch.stack(self._likely)
        sums = torch.stack((used, likely.detach()))
        if self._context is not None:
            distributed.all_reduce(sums, group=self._context.group)
        total, choices, experts = packed.tokens.shape[1], self._gates.choices, self._gates.experts
        share = experts * sums[0] / (total * choices)
        mine, all_ranks = ((share * part).sum() / (len(used) * total) for part in (likely, sums[1]))
        known = 0
        if self._replay and packed.experts is not None:
            first = min(self._gates.modules)
            known = int((packed.experts[:, first] >= 0).all(-1).sum())
        # The value is that of all ranks, the gradient that of this rank's tokens.
        self.load = ExpertLoad(sums, mine + (all_ranks - mine).detach(), total, known)

    def _hook(self, layer: int, gate: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, weights, chosen, *rest = output
        probabilities = logits.float().softmax(-1)
        if self._wanted is not None:
            wanted = self._wanted[:, layer]
            known = (wanted >= 0).all(-1, keepdim=True)
            chosen = torch.where(known, wanted, chosen)
            weights = torch.where(known, self._gates.weights(probabilities, chosen).to(weights.dtype), weights)
        likely = (probabilities if self._balanced else probabilities.detach())[: self._tokens].sum(0)
        if self._counting:
            self._likely.append(likely)
            self._used.append(_count(chosen[: self._tokens], self._gates.experts))
        return logits, weights, chosen, *rest


def _count(chosen: Tensor, experts: int) -> Tensor:
    return torch.bincount(chosen.flatten(), minlength=experts).float()


def watch(model: Any, *, context: ContextPeers | None, balance: float, replay: bool) -> WatchedGates | None:
    """None if the model has no gates that are known, and needs none. Raises RollartError."""
    gates = ExpertGates.of(model)
    if gates is None and (replay or balance):
        key = "training.replay_experts" if replay else "training.algorithm.expert_balance"
        raise RollartError(
            f"{type(model).__name__} is no mixture of experts, or one whose gates are not known; leave out {key}"
        )
    return None if gates is None else WatchedGates(gates, context=context, balanced=balance > 0, replay=replay)
