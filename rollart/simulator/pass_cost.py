"""The cost of forward passes of a simulated engine, in closed form.

A decode pass costs `fixed + slope * context`, and every pass adds one token to each sequence. So any number of passes
is an arithmetic series, and the number of passes that fit into some seconds is the root of a quadratic: an engine is
never stepped token by token.
"""

import math

from rollart.hardware.roofline import Roofline
from rollart.simulator.constants import Constants
from rollart.simulator.scenario import EnginePace

_DEFAULT = Constants()


class PassCost:
    """Of one engine: by the roofline of its devices and the host's overheads, or by a measured `pace`. Device and host
    take turns: a pass is scheduled when the one before it is sampled. `link` are seconds to fetch the KV of a token."""

    __slots__ = (
        *("_attend", "_bytes_s", "_kv", "_overhead", "_read", "_reduce", "_sequence", "_shape", "_token"),
        *("kv_bytes", "link"),
    )

    def __init__(self, roofline: Roofline, pace: EnginePace | None = None, constants: Constants = _DEFAULT) -> None:
        shape, device, count = roofline.shape, roofline.device, roofline.devices
        self._shape, self.kv_bytes = shape, shape.kv_bytes
        self._read: dict[int, float] = {}
        self.link = roofline.transfer_seconds(1)
        if pace is not None:
            self._overhead, self._token, self._attend, self._kv = pace.fixed, pace.token, 0.0, pace.context
            self._bytes_s = self._reduce = self._sequence = 0.0
            return
        slowdown = roofline.slowdown
        compute = slowdown / (device.tflops * 1e12 * constants.compute_efficiency * count)
        self._bytes_s = slowdown / (device.bandwidth * 1e9 * constants.memory_efficiency * count)
        self._token, self._attend = shape.token_flops * compute, shape.attention_flops * compute
        self._kv = shape.kv_bytes * self._bytes_s
        self._overhead, self._sequence = constants.pass_s * slowdown, constants.sequence_s * slowdown
        self._reduce = 0.0
        if count > 1:
            exchanges, sent = 2 * shape.layers, shape.hidden * shape.number_bytes
            reduced = 2 * (count - 1) / count * sent
            if shape.experts:  # the second of each layer sends tokens to their experts and back
                exchanges = 3 * shape.layers
                reduced = reduced / 2 + shape.experts_per_token * (count - 1) / count * sent
            self._overhead += exchanges * constants.all_reduce_s * slowdown
            rate = device.link * 1e9 * constants.memory_efficiency
            self._reduce = 2 * shape.layers * reduced * slowdown / rate

    def decode(self, batch: int, context: float) -> tuple[float, float]:
        """`fixed` and `slope` of a decode pass; `context` is the sum of the contexts, about."""
        around = self._overhead + batch * (self._reduce + self._sequence)
        computed, read = batch * self._token, self._weights(batch)
        if self._bytes_s == 0.0:  # measured: everything adds up
            return around + computed, self._kv
        if computed + context * self._attend > read + context * self._kv:
            return around + computed, self._attend
        return around + read, self._kv

    def mixed(
        self, tokens: int, attended: float, kv: float, passes: float, batch: int, context: float, prompts: int = 1
    ) -> float:
        """Seconds of `passes` passes that prefill `tokens` of `prompts` in all and decode `batch` sequences in each."""
        around = passes * (self._overhead + batch * self._sequence) + prompts * self._sequence
        around += (tokens + passes * batch) * self._reduce
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
