"""MeanFlow: learns u(z, r, t), the mean velocity from r to t, so that one pass crosses the whole flow.

The identity u = v - (t - r) du/dt gives the target; du/dt along the path is a Jacobian-vector product with the tangent
(v, 0, 1). DDE takes it as a central difference instead, two plain passes without gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rollart.config.robots import MeanFlowConfig
from rollart.robots.policies.base import Draws, Network, adaptive, integrate, mixed, velocity

_TINY = 1e-6


@dataclass(frozen=True)
class MeanFlow:
    config: MeanFlowConfig

    def loss(self, network: Network, x: Tensor, condition: Tensor, draws: Draws) -> Tensor:
        config = self.config
        rows, size = x.shape[1:]
        flow = round(rows * config.flow_share)  # the first rows have r = t
        one, two = draws.times(rows), draws.times(rows)
        t, r = torch.maximum(one, two), torch.minimum(one, two)
        r = torch.cat([t[:, :flow], r[:, flow:]], 1)
        e = draws.normal(rows, size)
        z, v = mixed(x, e, t), e - x
        u, hidden = velocity(network, config.predict, z, r, t, condition)
        aim = v if config.guidance == 1 else self._guided(network, z, t, v, condition, u.detach()[:, :flow])
        rest = (part[:, flow:] for part in (z, r, t, aim, condition))
        change = self.time_derivative(network, *rest) * (t - r)[:, flow:, None]
        target = aim - functional.pad(change, (0, 0, flow, 0))
        loss = adaptive(u - target, config.adaptive_power)
        if config.cosine:
            loss = loss + config.cosine * direction_loss(u, v)
        if config.dispersive:
            loss = loss + config.dispersive * dispersive_loss(hidden, config.temperature)
        return loss

    @torch.no_grad()
    def time_derivative(
        self, network: Network, z: Tensor, r: Tensor, t: Tensor, tangent: Tensor, condition: Tensor
    ) -> Tensor:
        """du/dt along the path: the target carries no gradient, so neither does this."""

        def mean(z: Tensor, t: Tensor) -> Tensor:
            return velocity(network, self.config.predict, z, r, t, condition)[0]

        if self.config.derivative == "jvp":
            derivative: Tensor = torch.func.jvp(mean, (z, t), (tangent, torch.ones_like(t)))[1]
            return derivative
        step = self.config.epsilon
        r, condition = torch.cat([r, r], 1), torch.cat([condition, condition], 1)  # both ends in one pass
        ends = torch.cat([z + step * tangent, z - step * tangent], 1), torch.cat([t + step, t - step], 1)
        after, before = mean(*ends).chunk(2, 1)
        return (after - before) / (2 * step)

    @torch.no_grad()
    def _guided(
        self, network: Network, z: Tensor, t: Tensor, v: Tensor, condition: Tensor, predicted: Tensor
    ) -> Tensor:
        """The velocity, pushed beyond the one that is `predicted`, which the first rows are known for."""
        flow = predicted.shape[1]
        z, t, condition = z[:, flow:], t[:, flow:], condition[:, flow:]
        rest, _ = velocity(network, self.config.predict, z, t, t, condition)
        return torch.lerp(torch.cat([predicted, rest], 1), v, self.config.guidance)

    def sample(self, network: Network, condition: Tensor, noise: Tensor) -> Tensor:
        return integrate(network, self.config.predict, condition, noise, self.config.steps, mean=True)


def direction_loss(u: Tensor, v: Tensor) -> Tensor:
    """-log((cos + 1) / 2): unlike a squared error, it does not vanish with the speed."""
    cosine = functional.cosine_similarity(u, v, dim=-1, eps=_TINY)
    return -torch.log(((cosine + 1) / 2).clamp_min(_TINY)).mean(-1)


def dispersive_loss(hidden: Tensor, temperature: float | str) -> Tensor:
    """log mean exp(-D / temperature) over pairs of rows, D their squared distance divided by the largest. Adaptive:
    the temperature is the median D, so the pull does not fade when few rows are far from all others. The largest has
    a gradient: without it, larger states would lower the loss, and they would grow without end."""
    squares = hidden.square().sum(-1)
    distance = (squares[:, :, None] + squares[:, None] - 2 * hidden @ hidden.transpose(1, 2)).clamp_min(0)
    distance = distance / distance.amax((1, 2), keepdim=True).clamp_min(_TINY)
    if temperature == "adaptive":
        scale = distance.detach().flatten(1).median(1).values.clamp_min(_TINY)[:, None, None]
    else:
        scale = torch.tensor(float(temperature))
    return torch.exp(-distance / scale).mean((1, 2)).log()
