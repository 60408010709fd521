"""What policies share: time runs from 0, the clean chunk x, to 1, the noise e: z = (1 - t) x + t e, velocity e - x."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from rollart.config.robots import Predict

Network = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`(z, r, t, condition)` to the output and a hidden state, as `PolicyNetwork`; tests use functions."""

MIN_TIME = 0.05  # the clean chunk is turned into a velocity by division by the time
_SMALL = 1e-3


class Draws:
    """Random numbers of each member from a generator of its own: a member trains the same alone and in a stack."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def normal(self, *shape: int) -> Tensor:
        return torch.stack([torch.randn(*shape, generator=generator) for generator in self.generators])

    def uniform(self, *shape: int) -> Tensor:
        return torch.stack([torch.rand(*shape, generator=generator) for generator in self.generators])

    def rows(self, counts: Sequence[int], batch: int) -> list[Tensor]:
        """For each member `batch` numbers below its count."""
        pairs = zip(counts, self.generators, strict=True)
        return [torch.randint(count, (batch,), generator=generator) for count, generator in pairs]

    def times(self, batch: int) -> Tensor:
        """Logit-normal: more in the middle, towards the clean end."""
        return torch.sigmoid(self.normal(batch) - 0.4)

    def state(self) -> Tensor:
        return torch.stack([generator.get_state() for generator in self.generators])

    def restore(self, state: Tensor) -> None:
        for generator, row in zip(self.generators, state, strict=True):
            generator.set_state(row.clone())


class RobotPolicy(Protocol):
    """How a network learns chunks, and how it makes them. Chunks are flat: [M, B, D]."""

    def loss(self, network: Network, x: Tensor, condition: Tensor, draws: Draws) -> Tensor:
        """The loss of each member, [M]."""
        ...

    def sample(self, network: Network, condition: Tensor, noise: Tensor) -> Tensor: ...


def mixed(x: Tensor, e: Tensor, t: Tensor) -> Tensor:
    """The noisy chunk at time `t` [M, B]."""
    return torch.lerp(x, e, t[..., None])


def velocity(
    network: Network, predict: Predict, z: Tensor, r: Tensor, t: Tensor, condition: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean velocity from `r` to `t`, and the hidden state, whatever the network predicts."""
    output, hidden = network(z, r, t, condition)
    if predict == "velocity":
        return output, hidden
    return (z - output) / t.clamp_min(MIN_TIME)[..., None], hidden


def adaptive(error: Tensor, power: float) -> Tensor:
    """The mean over the rows of d / (d + c)^power without gradient of the weight; d is a row's mean squared error."""
    squared = error.square().mean(-1)
    return (squared / (squared.detach() + _SMALL) ** power).mean(-1) if power else squared.mean(-1)


def integrate(
    network: Network, predict: Predict, condition: Tensor, noise: Tensor, steps: int, *, mean: bool
) -> Tensor:
    """Follow the velocity from noise to a chunk in equal steps; `mean`: with the mean velocity of each step."""
    z, times = noise, [1 - number / steps for number in range(steps + 1)]
    for start, end in pairwise(times):
        t = z.new_full(z.shape[:-1], start)
        r = torch.full_like(t, end) if mean else t
        z = z - (start - end) * velocity(network, predict, z, r, t, condition)[0]
    return z
