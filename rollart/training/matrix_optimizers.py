"""Optimizers that treat matrices in a way of their own, and what a checkpoint needs of any optimizer.

The state of a parameter is `step`, a number, and moments of the parameter's own shape and sharding, called `exp_avg`
and `exp_avg_sq`. So a checkpoint is read by any layout, and knows nothing of how an optimizer stores what it has:
`moments`, `read_state` and `write_state` are all it needs. All ranks call `step` at the same time.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.optim import Optimizer

from rollart.config import TrainingConfig
from rollart.training.shards import block

Moment = Literal["exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Moment, ...] = ("exp_avg", "exp_avg_sq")

EPSILON = 1e-8
MUON_RMS = 0.2  # of an update, before the learning rate: about AdamW's, so both share one learning rate
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # steep at 0: after five rounds singular values are between 0.7 and 1.2
NEWTON_SCHULZ_ROUNDS = 5
QUANTISED_TOGETHER = 256


def moments(optimizer: Optimizer, parameter: nn.Parameter) -> tuple[Moment, ...]:
    """Which moments a parameter has once it has been updated: the same on all ranks."""
    for group in optimizer.param_groups:
        if any(parameter is member for member in group["params"]):
            kinds: tuple[Moment, ...] = group.get("moments", MOMENTS)
            return kinds
    return ()


def read_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """`step` and the moments of a parameter, sharded like it; nothing if it was never updated. They are float32, and
    copies where the optimizer stores them in another form: read one parameter at a time."""
    state = optimizer.state.get(parameter, {})
    return {key: value.unpacked(parameter) if isinstance(value, Quantised) else value for key, value in state.items()}


def write_state(optimizer: Optimizer, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
    """The opposite of `read_state`. `state` is sharded like the parameter."""
    kept = {key: value.to(parameter.device) for key, value in state.items()}
    form = optimizer.packed if isinstance(optimizer, AdamW8bit) else None
    optimizer.state[parameter] = form(parameter, kept) if form else kept


# Matrices in a way of their own


class _MatrixOptimizer(Optimizer, ABC):
    """Updates `matrices` by `_update`, and the rest of `parameters` by AdamW. Both share groups and state."""

    moments: tuple[Moment, ...] = MOMENTS

    def __init__(self, matrices: list[nn.Parameter], parameters: list[nn.Parameter], config: TrainingConfig) -> None:
        chosen = {id(p) for p in matrices}
        own = {"params": matrices, "weight_decay": config.weight_decay, "moments": self.moments}
        super().__init__(
            [own, *decay_groups([p for p in parameters if id(p) not in chosen], config)], {"lr": config.lr}
        )
        self._betas, self._momentum = config.betas, config.momentum
        self._rest = plain_adamw(self.param_groups[1:], config)
        self._rest.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._rest.step()
        group = self.param_groups[0]
        self._update(group["params"], group["lr"], group["weight_decay"])

    @abstractmethod
    def _update(self, matrices: list[nn.Parameter], rate: float, decay: float) -> None: ...


class Muon(_MatrixOptimizer):
    """Momentum, made orthogonal by Newton-Schulz iterations: every direction of a matrix is learnt equally fast.

    A matrix must be whole for that. Ranks take turns: of as many matrices as there are ranks, each gathers all, keeps
    its own, and sends what it made of it to the others. Experts, which a rank has whole, need no exchange. The result
    does not depend on the layout.
    """

    moments = ("exp_avg",)

    def _update(self, matrices: list[nn.Parameter], rate: float, decay: float) -> None:
        grouped = distributed.is_initialized()
        rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if grouped else (0, 1)
        here = [p for p in matrices if _has_whole_matrices(p)]
        for p in here:
            _move(p, orthogonal(_local(self._direction(p))), rate, decay)
        spread = [p for p in matrices if not _has_whole_matrices(p)]
        for start in range(0, len(spread), ranks):
            turn, mine = spread[start : start + ranks], None
            for number, p in enumerate(turn):
                whole = _whole(self._direction(p))
                if number == rank:
                    mine = orthogonal(whole)
            for number, p in enumerate(turn):
                update = mine if number == rank else torch.empty(p.shape, device=p.device)
                assert update is not None
                if ranks > 1:
                    distributed.broadcast(update, number)
                _move(p, _part(update, p), rate, decay)

    def _direction(self, p: nn.Parameter) -> Tensor:
        """Nesterov momentum. A parameter without a gradient has one of zeros: all ranks take part in every exchange."""
        state = self.state[p]
        if not state:
            state |= {"step": torch.zeros((), device=p.device), "exp_avg": torch.zeros_like(p)}
        state["step"] += 1
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        state["exp_avg"].lerp_(grad, 1 - self._momentum)
        return grad.lerp(state["exp_avg"], self._momentum)


def orthogonal(matrices: Tensor) -> Tensor:
    """About U V^T of U S V^T, of each of the matrices in the last two dimensions, in float32."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    out: Tensor = matrices.float().mT if tall else matrices.float()
    out = out / out.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-20)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_ROUNDS):
        square = out @ out.mT
        out = a * out + (b * square + c * square @ square) @ out
    out = out.mT if tall else out
    return out.contiguous()


def _move(p: nn.Parameter, update: Tensor, rate: float, decay: float) -> None:
    values = _local(p)
    values.mul_(1 - rate * decay)
    values.add_(update, alpha=-rate * MUON_RMS * math.sqrt(max(p.shape[-2:])))


class AdamW8bit(_MatrixOptimizer):
    """AdamW whose moments are `Quantised` between two updates."""

    def _update(self, matrices: list[nn.Parameter], rate: float, decay: float) -> None:
        first, second = self._betas
        for p in matrices:
            if p.grad is None:
                continue
            state, grad, values = self.state[p], _local(p.grad), _local(p)
            zeros = torch.zeros_like(grad)
            step = float(state["step"]) + 1 if state else 1.0
            mean = (state["exp_avg"].values() if state else zeros).lerp(grad, 1 - first)
            square = (state["exp_avg_sq"].values() if state else zeros).mul(second)
            square.addcmul_(grad, grad, value=1 - second)
            root = square.sqrt().div_(math.sqrt(1 - second**step)).add_(EPSILON)
            values.mul_(1 - rate * decay).addcdiv_(mean, root, value=-rate / (1 - first**step))
            self.state[p] = self._pack(step, mean, square)

    def packed(self, p: nn.Parameter, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """The state of a parameter, given in float32, as it is kept."""
        if "moments" not in self._group_of(p):
            return dict(state)
        return self._pack(float(state["step"]), _local(state["exp_avg"]), _local(state["exp_avg_sq"]))

    def _group_of(self, p: nn.Parameter) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(p is member for member in group["params"]))

    def _pack(self, step: float, mean: Tensor, square: Tensor) -> dict[str, Any]:
        return {
            "step": torch.tensor(step),
            "exp_avg": Quantised(mean, signed=True),
            "exp_avg_sq": Quantised(square, signed=False),
        }


class Quantised:
    """A tensor in 8 bits, with the largest value of each run of a row (its last dimension) in float32.

    Codes are dense near zero, where most values are: they are square roots of what is signed, and fourth roots of what
    is not. What is not signed, and divides, never becomes 0 in a run that has anything else. Values that were packed
    before are packed without a loss.
    """

    def __init__(self, values: Tensor, *, signed: bool) -> None:
        self._shape, self._signed = values.shape, signed
        width = values.shape[-1]
        runs = max(1, -(-width // QUANTISED_TOGETHER))
        size = -(-width // runs)
        cut = functional.pad(values, (0, runs * size - width)).reshape(math.prod(values.shape[:-1]), runs, size)
        self._largest = cut.abs().amax(-1, keepdim=True) if size else cut.new_zeros(len(cut), runs, 1)
        unit = cut / self._largest.clamp_min(torch.finfo(torch.float32).tiny)
        if signed:
            self._codes = (unit.abs().sqrt_() * 127).round_().copysign_(unit).to(torch.int8)
        else:
            self._codes = (unit.sqrt_().sqrt_() * 255).round_().clamp_(min=1).to(torch.uint8)

    def values(self) -> Tensor:
        if self._signed:
            unit = self._codes.float() / 127
            unit = unit * unit.abs()
        else:
            unit = (self._codes.float() / 255).square_().square_()
        rows = (unit * self._largest).flatten(1)
        return rows[:, : self._shape[-1]].reshape(self._shape)

    def unpacked(self, like: Tensor) -> Tensor:
        """As a tensor that is sharded like another."""
        if not isinstance(like, DTensor):
            return self.values()
        mesh, placements = like.device_mesh, like.placements
        return DTensor.from_local(
            self.values(), mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def plain_adamw(groups: list[dict[str, Any]], config: TrainingConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=EPSILON, fused=True)


def decay_groups(parameters: list[nn.Parameter], config: TrainingConfig) -> list[dict[str, Any]]:
    """Weight decay is for matrices, not for norms and biases."""
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def is_matrix(p: Tensor) -> bool:
    """Or several, one per expert. Not the kernels of convolutions over channels."""
    return p.ndim in (2, 3) and min(p.shape[-2:]) > 1


def _has_whole_matrices(p: Tensor) -> bool:
    if not isinstance(p, DTensor):
        return True
    return p.ndim == 3 and all(s.is_replicate() or (isinstance(s, Shard) and s.dim == 0) for s in p.placements)


def _local(tensor: Tensor) -> Tensor:
    return block(tensor).values


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank has of a tensor that is sharded like another."""
    mine = block(like)
    return whole[tuple(slice(at, at + size) for at, size in zip(mine.offset, mine.values.shape, strict=True))]
