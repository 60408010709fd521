"""A trained model, its optimizer, and what a checkpoint keeps of both."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rollart.training.block_files import BlockReader
from rollart.training.matrix_optimizers import moments, read_state, write_state
from rollart.training.ranks import Ranks


class Weights(Protocol):
    """What is trained: `Strategy` has it."""

    def parameters(self) -> dict[str, nn.Parameter]: ...

    def buffers(self) -> dict[str, Tensor]: ...


@dataclass(slots=True)
class TrainedModel:
    """`kind` names its weights in a checkpoint, and `prefix` comes before its moments and the names of its parameters
    among the steps of the manifest. All ranks call each method at the same time."""

    kind: str
    prefix: str
    model: Weights
    optimizer: Optimizer
    updates: int = 0

    def update(self, loss: float, rate: float, grad_clip: float, ranks: Ranks) -> tuple[float, float, bool]:
        """Update on the gradients of all passes, whose loss on this rank is `loss`. Returns the loss and norm of all
        ranks, and whether they are finite: what is not on one rank is skipped by all."""
        (loss,) = ranks.all_reduce([loss])
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parameters = self.model.parameters().values()
        norm = ranks.grad_norm(parameters)
        clip_grads(parameters, grad_clip / (norm + 1e-6))
        finite = isfinite(loss) and isfinite(norm)
        if finite:
            self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm, finite

    def weights(self) -> dict[str, Tensor]:
        return {**self.model.parameters(), **self.model.buffers()}

    def steps(self) -> dict[str, float]:
        """Optimizer steps of each parameter that has any."""
        state = self.optimizer.state
        named = self.model.parameters().items()
        return {f"{self.prefix}{name}": state[p]["step"].item() for name, p in named if p in state}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint holds, under `kind/name of the parameter`."""
        for name, tensor in self.weights().items():
            yield f"{self.kind}/{name}", tensor
        for name, parameter in self.model.parameters().items():
            for kind, moment in read_state(self.optimizer, parameter).items():
                if kind != "step":
                    yield f"{self.prefix}{kind}/{name}", moment

    def shapes(self, steps: Mapping[str, float]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """What a checkpoint must have, with what it is of: weights, and the moments of parameters with `steps`."""
        for name, tensor in self.weights().items():
            yield f"{self.kind}/{name}", "model", tuple(tensor.shape)
        for name, parameter in self.model.parameters().items():
            for kind in moments(self.optimizer, parameter) if f"{self.prefix}{name}" in steps else ():
                yield f"{self.prefix}{kind}/{name}", "optimizer", tuple(parameter.shape)

    def size(self) -> int:
        """Bytes in a checkpoint, from the shapes alone; moments are float32, however the optimizer keeps them."""
        weights = sum(one.nbytes for one in self.weights().values())
        updated = (one for one in self.model.parameters().values() if one in self.optimizer.state)
        return weights + sum(4 * one.numel() * len(moments(self.optimizer, one)) for one in updated)

    @torch.no_grad()
    def restore(self, reader: BlockReader, updates: int, steps: Mapping[str, float]) -> None:
        """Each rank reads only the blocks that it has."""
        for name, tensor in self.weights().items():
            reader.fill(f"{self.kind}/{name}", tensor)
        self.updates = updates
        self.optimizer.state.clear()
        for name, parameter in self.model.parameters().items():
            if (key := f"{self.prefix}{name}") in steps:
                state = {"step": torch.tensor(steps[key])}
                for kind in moments(self.optimizer, parameter):
                    state[kind] = reader.fill(f"{self.prefix}{kind}/{name}", torch.zeros_like(parameter))
                write_state(self.optimizer, parameter, state)


def clip_grads(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Scale the gradients by `factor`, if it is below 1."""
    if factor < 1.0:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_([grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads], factor)
