"""The network of all policies: a residual MLP over a noisy chunk, modulated (FiLM) by observation and time.

It holds several policies of the same shape at once, its members: every weight has a leading dimension for them, so
seeds and tasks train together at the cost of few large matrix products. Members never mix.

Letters of shapes: M members, B rows, D numbers of a chunk, C numbers of a condition, W width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

_FREQUENCIES = 16
_TIME = 4 * _FREQUENCIES  # sine and cosine of the time and of the interval


class MemberLinear(nn.Module):
    """A linear layer of each member; initialised as torch's, each member from its own generator."""

    def __init__(self, inputs: int, outputs: int, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)

        def draw(*shape: int) -> Tensor:
            rows = [torch.rand(*shape, generator=generator) for generator in generators]
            return (torch.stack(rows) * 2 - 1) * bound

        self.weight = nn.Parameter(draw(inputs, outputs))
        self.bias = nn.Parameter(draw(1, outputs))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, rows, self.weight)


class FilmBlock(nn.Module):
    """h + mlp(norm(h)) (1 + scale) + shift, with scale and shift from the condition."""

    def __init__(self, width: int, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.film = MemberLinear(width, 2 * width, generators)
        self.up = MemberLinear(width, 2 * width, generators)
        self.down = MemberLinear(2 * width, width, generators)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.film(condition).chunk(2, -1)
        inner = functional.silu(self.up(functional.layer_norm(hidden, hidden.shape[-1:])))
        return torch.addcmul(hidden + shift, self.down(inner), 1 + scale)


@dataclass(frozen=True, slots=True)
class CloudShape:
    """A condition is `history` times `state` numbers and as many `points` of three."""

    history: int
    state: int
    points: int


class PointEncoder(nn.Module):
    """As PointNet: the same layers for every point, then the largest of each feature, so their order does not matter.
    [M, B, C] to [M, B, `size`]."""

    def __init__(self, shape: CloudShape, width: int, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.shape, self.size = shape, shape.history * (shape.state + width)
        self.enter = MemberLinear(3, width, generators)
        self.leave = MemberLinear(width, width, generators)

    def forward(self, condition: Tensor) -> Tensor:
        shape = self.shape
        members, rows, _ = condition.shape
        steps = condition.reshape(members, rows, shape.history, -1)
        state = steps[..., : shape.state]
        points = steps[..., shape.state :].reshape(members, rows, shape.history, shape.points, 3)
        features = self.leave(functional.silu(self.enter(points.flatten(1, 3))))
        largest = features.reshape(*points.shape[:-1], -1).amax(-2)
        return torch.cat([state, largest], -1).flatten(-2)


class PolicyNetwork(nn.Module):
    """`forward(z, r, t, condition)`: the output for noisy chunks `z` [M, B, D] over the interval from `r` to `t`
    [M, B], and the hidden state in the middle [M, B, W]. One generator for each member. `cloud`: conditions have
    points."""

    def __init__(
        self,
        condition: int,
        chunk: int,
        width: int,
        layers: int,
        generators: Sequence[torch.Generator],
        cloud: CloudShape | None = None,
    ) -> None:
        super().__init__()
        self.members, self.chunk = len(generators), chunk
        self.encoder = PointEncoder(cloud, width, generators) if cloud else None
        condition = self.encoder.size if self.encoder else condition
        self.observe = MemberLinear(condition, width, generators)
        self.observe_out = MemberLinear(width, width, generators)
        self.time = MemberLinear(_TIME, width, generators)
        self.time_out = MemberLinear(width, width, generators)
        self.enter = MemberLinear(chunk, width, generators)
        self.blocks = nn.ModuleList(FilmBlock(width, generators) for _ in range(layers))
        self.leave = MemberLinear(width, chunk, generators)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.logspace(0, 1.5, _FREQUENCIES), persistent=False)

    def forward(self, z: Tensor, r: Tensor, t: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        times = torch.stack([t, t - r], -1)[..., None] * self.frequencies
        times = torch.cat([times.sin(), times.cos()], -1).flatten(-2)
        condition = condition if self.encoder is None else self.encoder(condition)
        seen = self.observe_out(functional.silu(self.observe(condition)))
        what = functional.silu(seen + self.time_out(functional.silu(self.time(times))))
        hidden = middle = self.enter(z)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, what)
            if number == len(self.blocks) // 2:
                middle = hidden
        return self.leave(functional.layer_norm(hidden, hidden.shape[-1:])), middle


class CandidateScorer(nn.Module):
    """A logit for each candidate [..., K, D] of a chunk under its condition [..., C]. At first, all are 0."""

    def __init__(self, condition: int, chunk: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.enter = MemberLinear(condition + chunk, width, [generator])
        self.middle = MemberLinear(width, width, [generator])
        self.leave = MemberLinear(width, 1, [generator])
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, condition: Tensor, candidates: Tensor) -> Tensor:
        seen = condition[..., None, :].expand(*candidates.shape[:-1], -1)
        rows = torch.cat([seen, candidates], -1).flatten(0, -2)[None]
        hidden = functional.silu(self.middle(functional.silu(self.enter(rows))))
        scores: Tensor = self.leave(hidden).reshape(candidates.shape[:-1])
        return scores
