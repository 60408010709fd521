"""The time of a training step by its layout: the slower of computing and of what FSDP moves, plus tensor parallelism.

Plain arithmetic over the same setup as `training_memory`, so that the simulator and the planner price what `rollart
check` says fits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollart.hardware.devices import DeviceClass
from rollart.hardware.roofline import MEMORY_EFFICIENCY, ModelShape
from rollart.hardware.training_memory import TrainingSetup

NODE = 8  # devices that `link` connects; between nodes there is the network
_AGAIN = {"none": 0.0, "selective": 0.15, "full": 1.0}  # forward passes that recomputation adds
_HALF_SPEED = 0.5  # of float32 on tensor cores, by bfloat16


@dataclass(frozen=True, slots=True)
class StepPasses:
    """Passes over the batch in one step: `epochs` forward and backward, `scored` forward only (logprobs before the
    first update, and of the reference)."""

    epochs: float = 1.0
    scored: float = 0.0

    def forward_flops(self, recompute: str) -> float:
        """All FLOPs of the step in units of one forward pass; a backward pass is two."""
        return self.epochs * (3.0 + _AGAIN[recompute]) + self.scored


def step_seconds(
    lengths: Sequence[float],
    *,
    shape: ModelShape,
    setup: TrainingSetup,
    device: DeviceClass,
    passes: StepPasses,
    efficiency: float,
) -> float:
    """Of one step over sequences of these lengths, without what is fixed."""
    layout, tokens = setup.layout, sum(lengths)
    forward = tokens * shape.token_flops + shape.attention_flops * sum(each * each for each in lengths) / 2
    speed = device.tflops * 1e12 * layout.ranks * efficiency * (1.0 if setup.dtype == "bfloat16" else _HALF_SPEED)
    compute = forward * passes.forward_flops(setup.recompute) / speed
    packs = math.ceil(tokens / layout.data / setup.tokens) if tokens else 0
    moved = packs * _gathered_bytes(shape, setup) * (2 * passes.epochs + passes.scored)
    moved += packs * passes.epochs * 2 * _gathered_bytes(shape, setup)  # gradients, in float32
    seconds = max(compute, moved / _rate(device, layout.ranks)) if layout.shards > 1 else compute
    return seconds + _tensor_seconds(tokens / layout.data, shape, setup, device, passes)


def _gathered_bytes(shape: ModelShape, setup: TrainingSetup) -> float:
    """Of the weights that a rank gathers for one pass; experts stay where they are."""
    layout = setup.layout
    experts = shape.expert * shape.experts / (layout.expert if layout.expert > 1 else layout.tensor)
    elements = (shape.dense + shape.lookup) / layout.tensor + experts
    return setup.number * elements * (layout.shards - 1) / layout.shards


def _rate(device: DeviceClass, ranks: int) -> float:
    """Bytes a second that a rank receives: within a node by its link; between nodes each rank of a node receives its
    part over the network, which all of them share, and gets the others over the link."""
    link, network = device.link * 1e9 * MEMORY_EFFICIENCY, device.network * 1e9 * MEMORY_EFFICIENCY
    return link if ranks <= NODE else min(link, network)


def _tensor_seconds(
    tokens: float, shape: ModelShape, setup: TrainingSetup, device: DeviceClass, passes: StepPasses
) -> float:
    """Two all-reduces a layer in each forward and each backward pass."""
    size = setup.layout.tensor
    if size == 1:
        return 0.0
    sent = 2 * (size - 1) / size * shape.hidden * setup.number * tokens / setup.layout.context
    times = 2 * shape.layers * (passes.epochs * (2 + _AGAIN[setup.recompute]) + passes.scored)
    return times * sent / (device.link * 1e9 * MEMORY_EFFICIENCY)
