"""How long a request would take on an engine, and how much it would delay the others there.

The roofline's formula with its constants precomputed: a prediction is made for every pool on every turn.
"""

from msgspec import Struct

from rollart.hardware.roofline import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY, Roofline


class Predictor:
    """Seconds of forward passes."""

    __slots__ = ("_attend", "_fixed", "_kv", "_link", "_memory", "_read", "_shape", "_token")

    def __init__(self, roofline: Roofline) -> None:
        shape, device = roofline.shape, roofline.device
        compute = roofline.slowdown / (device.tflops * 1e12 * COMPUTE_EFFICIENCY * roofline.devices)
        self._memory = roofline.slowdown / (device.bandwidth * 1e9 * MEMORY_EFFICIENCY * roofline.devices)
        self._token = shape.token_flops * compute
        self._attend = shape.attention_flops * compute
        self._kv = shape.kv_bytes * self._memory
        self._link = roofline.transfer_seconds(1)
        self._shape = shape
        self._read: dict[int, float] = {}
        self._fixed = 0.0 if shape.experts else shape.weight_bytes(1) * self._memory  # 0: it depends on the tokens

    def prefill(self, new: int, cached: int) -> tuple[float, float]:
        """`new` tokens after `cached` ones: the computation alone, and with the reading of weights, which requests that
        are prefilled together share."""
        if new <= 0:
            return 0.0, 0.0
        compute = new * (self._token + self._attend * (cached + new / 2))
        read = (self._fixed or self._weights(new)) + (cached + new) * self._kv
        return compute, compute if compute > read else read

    def decode(self, sequences: int, contexts: float) -> float:
        """One step: a token for each of `sequences`, whose contexts have `contexts` tokens in all."""
        if sequences <= 0:
            return 0.0
        compute = sequences * self._token + contexts * self._attend
        read = (self._fixed or self._weights(sequences)) + contexts * self._kv
        return compute if compute > read else read

    def transfer(self, tokens: int) -> float:
        return tokens * self._link

    def _weights(self, tokens: int) -> float:
        if (read := self._read.get(tokens)) is None:
            read = self._read[tokens] = self._shape.weight_bytes(tokens) * self._memory
        return read


class Prediction(Struct, gc=False):
    """Seconds until there is room for it, until the prefill before it is done, of its prefill, of each decoded token
    and of all of them. `work` is what its prefill adds to the engine's backlog, `delay` what it costs all requests
    there, `factors` the corrections of prefill and decode that are included."""

    room: float
    wait: float
    prefill: float
    token: float
    decode: float
    work: float
    delay: float
    factors: tuple[float, float]

    @property
    def seconds(self) -> float:
        return self.room + self.wait + self.prefill + self.decode

    @property
    def cost(self) -> float:
        return self.room + self.wait + self.delay
