"""Consistency flow matching (FlowPolicy): two near points of a path must lead to the same end of their segment."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.config.robots import ConsistencyConfig
from rollart.robots.policies.base import Draws, Network, integrate, mixed, velocity


@dataclass(frozen=True)
class ConsistencyFlow:
    config: ConsistencyConfig

    def loss(self, network: Network, x: Tensor, condition: Tensor, draws: Draws) -> Tensor:
        config = self.config
        t = draws.uniform(x.shape[1]).clamp_min(config.delta)
        s = t - config.delta
        end = (torch.ceil(t * config.segments) - 1).clamp_min(0) / config.segments
        e = draws.normal(*x.shape[1:])
        later, earlier = mixed(x, e, t), mixed(x, e, s)
        v = velocity(network, config.predict, later, t, t, condition)[0]
        with torch.no_grad():
            v_earlier = velocity(network, config.predict, earlier, s, s, condition)[0]
            # At the end of the segment the flow itself is known.
            over = (s <= end)[..., None]
            goal = torch.where(over, mixed(x, e, end), earlier - (s - end)[..., None] * v_earlier)
        agreement = (later - (t - end)[..., None] * v - goal).square().mean((1, 2))
        apart = (v - v_earlier).square() * ~over
        return agreement + config.velocity_weight * apart.mean((1, 2))

    def sample(self, network: Network, condition: Tensor, noise: Tensor) -> Tensor:
        return integrate(network, self.config.predict, condition, noise, self.config.steps, mean=False)
