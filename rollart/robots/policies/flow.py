"""Flow matching: learns the velocity at every point of straight paths from noise to chunks."""

from dataclasses import dataclass

from torch import Tensor

from rollart.config.robots import FlowConfig
from rollart.robots.policies.base import Draws, Network, adaptive, integrate, mixed, velocity


@dataclass(frozen=True)
class FlowMatching:
    config: FlowConfig

    def loss(self, network: Network, x: Tensor, condition: Tensor, draws: Draws) -> Tensor:
        t, e = draws.times(x.shape[1]), draws.normal(*x.shape[1:])
        v = velocity(network, self.config.predict, mixed(x, e, t), t, t, condition)[0]
        return adaptive(v - (e - x), self.config.adaptive_power)

    def sample(self, network: Network, condition: Tensor, noise: Tensor) -> Tensor:
        return integrate(network, self.config.predict, condition, noise, self.config.steps, mean=False)
