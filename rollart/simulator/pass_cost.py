"""The cost of forward passes of a simulated engine, in closed form.

A decode pass costs `fixed + slope * context`, and every pass adds one token to each sequence. So any number of passes
is an arithmetic series, and the number of passes that fit into some seconds is the root of a quadratic: an engine is
never stepped token by token.
"""

import math

from rollart.hardware.roofline import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY, Roofline
from rollart.simulator.constants import ALL_REDUCE_S, PASS_S
from rollart.simulator.scenario import EnginePace


class PassCost:
    """Of one engine: by the roofline of its devices, or by a measured `pace`."""

    __slots__ = ("_attend", "_bytes_s", "_kv", "_overhead", "_read", "_reduce", "_shape", "_token", "kv_bytes", "link")

    def __init__(self, roofline: Roofline, pace: EnginePace | None = None) -> None:
        shape, device, count = roofline.shape, roofline.device, roofline.devices
        self._shape, self.kv_bytes = shape, shape.kv_bytes
        self._read: dict[int, float] = {}
        self.link = roofline.transfer_seconds(1)
        if pace is not None:
            self._overhead, self._token, self._attend, self._kv = pace.fixed, pace.token, 0.0, pace.context
            self._bytes_s = self._reduce = 0.0
            return
        compute = roofline.slowdown / (device.tflops * 1e12 * COMPUTE_EFFICIENCY * count)
        self._bytes_s = roofline.slowdown / (device.bandwidth * 1e9 * MEMORY_EFFICIENCY * count)
        self._token, self._attend = shape.token_flops * compute, shape.attention_flops * compute
        self._kv = shape.kv_bytes * self._bytes_s
        self._overhead = PASS_S * roofline.slowdown
        self._reduce = 0.0
        if count > 1:
            self._overhead += 2 * shape.layers * ALL_REDUCE_S * roofline.slowdown
            sent = 2 * (count - 1) / count * shape.hidden * shape.number_bytes
            self._reduce = 2 * shape.layers * sent * roofline.slowdown / (device.link * 1e9 * MEMORY_EFFICIENCY)

    def decode(self, batch: int, context: float) -> tuple[float, float]:
        """`fixed` and `slope` of a decode pass; `context` is the sum of the contexts, about."""
        around = self._overhead + batch * self._reduce
        computed, read = batch * self._token, self._weights(batch)
        if self._bytes_s == 0.0:  # measured: everything adds up
            return around + computed, self._kv
        if computed + context * self._attend > read + context * self._kv:
            return around + computed, self._attend
        return around + read, self._kv

    def mixed(self, tokens: int, attended: float, kv: float, passes: float, batch: int, context: float) -> float:
        """Seconds of `passes` passes that prefill `tokens` in all and decode `batch` sequences in each."""
        around = passes * self._overhead + (tokens + passes * batch) * self._reduce
        computed = (tokens + passes * batch) * self._token + (attended + passes * context) * self._attend
        each = tokens / passes + batch
        read = passes * (self._weights(math.ceil(each)) + context * self._kv) + kv * self._kv
        return around + (computed + read if self._bytes_s == 0.0 else max(computed, read))

    def _weights(self, tokens: int) -> float:
        if (read := self._read.get(tokens)) is None:
            read = self._read[tokens] = self._shape.weight_bytes(tokens) * self._bytes_s
        return read


def seconds_of(steps: float, fixed: float, slope: float, batch: int, context: float) -> float:
    """Of `steps` decode passes, each of which adds one token to every context."""
    return steps * (fixed + slope * (context + batch * (steps - 1) / 2)) if steps > 0 else 0.0


def steps_in(seconds: float, fixed: float, slope: float, batch: int, context: float) -> float:
    """The inverse of `seconds_of`."""
    a, b = slope * batch / 2, fixed + slope * (context - batch / 2)
    return 2 * seconds / (b + math.sqrt(b * b + 4 * a * seconds))  # the root in a form that does not cancel
