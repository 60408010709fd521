"""Constants of the models that are neither in a scenario nor in a data sheet.

One set serves all scenarios; `simulate.constants` changes them for one. The values of those with a prior in
`benchmarks/paper_priors.yaml` were chosen for all figures of the RollArt paper together, starting from what `python
-m benchmarks.fit_paper` found; those of weights are from its table of transfers.
"""

import math
import random

from pydantic import Field

from rollart.config import Section
from rollart.core.seeds import seed_of
from rollart.hardware.roofline import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY

LINKS = {"ethernet": 25.0, "infiniband": 50.0}
"""GB/s: 200 Gbit/s between clusters and 400 Gbit/s within one, as in the paper's set-up."""


def _share(default: float, description: str) -> float:
    value: float = Field(default, gt=0, le=1, description=description)
    return value


def _seconds(default: float, description: str) -> float:
    value: float = Field(default, ge=0, description=description)
    return value


class Constants(Section):
    """Constants of the simulated services, the same for all scenarios unless given."""

    compute_efficiency: float = _share(0.45, "of the peak FLOP/s, in a forward pass")
    memory_efficiency: float = _share(0.7, "of the memory bandwidth, in a forward pass")
    pass_s: float = _seconds(0.0037, "host seconds of a forward pass: scheduling, sampling, launching")
    sequence_s: float = _seconds(0.0001, "host seconds that each sequence in a pass adds")
    all_reduce_s: float = _seconds(40e-6, "latency of an exchange between the devices of one engine, two a layer")
    kv_memory: float = _share(0.9, "of a device's memory that weights and KV may fill: the engine's default")
    train_efficiency: float = _share(
        0.36, "of the peak FLOP/s, for all passes of a training step: padding, bubbles and exposed exchanges included"
    )
    train_fixed_s: float = _seconds(40.0, "of a training step on devices, whatever its tokens")
    switch_rate: float = Field(
        0.15,
        gt=0,
        description="GB/s a device of weights, gradients and optimizer state, from generation to training and back, "
        "when they take turns on the same devices",
    )
    push_efficiency: float = _share(0.0195, "of the link's rate, from the trainer into a store in another cluster")
    pull_efficiency: float = _share(0.0415, "of the link's rate, from the store into the engines")
    pull_exposed: float = _share(0.3, "of the pull, for which engines stand still; the rest overlaps")
    collective_efficiency: float = _share(
        0.12, "of the link's rate, when trainer and engines stop and exchange weights directly"
    )

    def drawn(self, seed: int) -> "Constants":
        """What else they could be: each times a log-normal factor."""
        rng, update = random.Random(seed_of("constants", seed)), {}
        for name, deviation in UNCERTAINTY.items():
            value = getattr(self, name) * math.exp(rng.gauss(0.0, deviation))
            update[name] = value if name.endswith("_s") else min(1.0, value)
        return self.model_copy(update=update)


EMULATED = Constants(
    compute_efficiency=COMPUTE_EFFICIENCY,
    memory_efficiency=MEMORY_EFFICIENCY,
    pass_s=0.0,
    sequence_s=0.0,
    all_reduce_s=0.0,
)
"""Of engines that are paced to a device: exactly its roofline."""

UNCERTAINTY = {
    "compute_efficiency": 0.15,
    "memory_efficiency": 0.08,
    "pass_s": 0.4,
    "sequence_s": 0.4,
    "all_reduce_s": 0.4,
    "train_efficiency": 0.2,
    "train_fixed_s": 0.4,
    "push_efficiency": 0.15,
    "pull_efficiency": 0.2,
    "collective_efficiency": 0.4,
}
"""Standard deviations of their logarithms: about half as wide as the priors of those that have one, and what the
published transfers of three sizes differ by."""

ASSUMED_TOKENS = 0.4
"""The same for the tokens of tasks that a scenario says nothing about."""
