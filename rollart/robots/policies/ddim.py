"""Diffusion: learns the clean chunk from a noisy one; samples with DDIM, without new noise."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.config.robots import DiffusionConfig
from rollart.robots.policies.base import Draws, Network

_OFFSET = 0.008  # of the cosine schedule
_MIN_SIGNAL = 1e-4


@dataclass(frozen=True)
class Diffusion:
    config: DiffusionConfig

    def signal(self) -> Tensor:
        """The share of the variance that is signal, by noise level."""
        share = torch.arange(self.config.noise_levels + 1) / self.config.noise_levels
        curve = torch.cos((share + _OFFSET) / (1 + _OFFSET) * math.pi / 2) ** 2
        return (curve / curve[0]).clamp(_MIN_SIGNAL, 1)[1:]

    def loss(self, network: Network, x: Tensor, condition: Tensor, draws: Draws) -> Tensor:
        levels = self.config.noise_levels
        level = torch.stack(draws.rows([levels] * x.shape[0], x.shape[1]))
        signal, t = self.signal()[level][..., None], (level + 1) / levels
        noisy = signal.sqrt() * x + (1 - signal).sqrt() * draws.normal(*x.shape[1:])
        return (network(noisy, t, t, condition)[0] - x).square().mean((1, 2))

    def sample(self, network: Network, condition: Tensor, noise: Tensor) -> Tensor:
        levels = torch.linspace(self.config.noise_levels - 1, 0, self.config.steps).long().tolist()
        signals = [*(self.signal()[level].item() for level in levels), 1.0]
        z = noise
        for number, level in enumerate(levels):
            signal, following = signals[number], signals[number + 1]
            t = z.new_full(z.shape[:-1], (level + 1) / self.config.noise_levels)
            clean = network(z, t, t, condition)[0].clamp(-1, 1)
            direction = (z - math.sqrt(signal) * clean) / math.sqrt(1 - signal)
            z = math.sqrt(following) * clean + math.sqrt(1 - following) * direction
        return z
