"""Regression: the mean of the demonstrated chunks, without noise."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.config.robots import RegressionConfig
from rollart.robots.policies.base import Draws, Network


@dataclass(frozen=True)
class Regression:
    config: RegressionConfig

    def loss(self, network: Network, x: Tensor, condition: Tensor, draws: Draws) -> Tensor:
        return (self.sample(network, condition, x) - x).square().mean((1, 2))

    def sample(self, network: Network, condition: Tensor, noise: Tensor) -> Tensor:
        t = noise.new_ones(noise.shape[:-1])
        return network(torch.zeros_like(noise), t, t, condition)[0]
