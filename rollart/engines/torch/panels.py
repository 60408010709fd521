"""Products in float32 by the engine's own code, `products.c`, with copies of the weights in its layout.

One layout serves any number of tokens, with and without a bias, added to what is there or passed through the gate of
an MLP.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from rollart.engines.torch.products import Affine, Output


class _Product(ctypes.Structure):
    """`struct product` of products.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "panels", "bias", "total", "out")),
        *((name, ctypes.c_int64) for name in ("tokens", "outputs", "inputs")),
        *((name, ctypes.c_int32) for name in ("threads", "gated")),
    )


class PanelKernels:
    """The functions of a compiled products.c."""

    def __init__(self, library: ctypes.CDLL, columns: int) -> None:
        self.columns = columns
        self.multiply, self._pack = library.multiply, library.pack_panels
        pointer, long = ctypes.c_void_p, ctypes.c_int64
        self.multiply.argtypes, self.multiply.restype = (pointer,), None
        self._pack.argtypes, self._pack.restype = (pointer, long, long, pointer, long, long), None

    @classmethod
    def of(cls, library: ctypes.CDLL) -> "PanelKernels | None":
        """None if there is no code for this processor."""
        columns = int(library.panel_columns())
        return cls(library, columns) if columns else None

    def count(self, outputs: int) -> int:
        return -(-outputs // self.columns)

    def pack(self, weights: Sequence[Tensor]) -> Tensor:
        """Weights of one shape; their panels by turns."""
        outputs, inputs = weights[0].shape
        panels = torch.empty(len(weights) * self.count(outputs) * self.columns * inputs)
        for first, weight in enumerate(weights):
            whole = weight.contiguous()
            self._pack(whole.data_ptr(), outputs, inputs, panels.data_ptr(), first, len(weights))
        return panels


class PanelProduct:
    """Several weights are one: their outputs lie side by side, or are gate and up projection of `gated`."""

    def __init__(self, affines: Sequence[Affine], kernels: PanelKernels, *, gated: bool = False) -> None:
        weights = [weight for weight, _ in affines]
        biases = [bias.unsqueeze(1) for _, bias in affines if bias is not None]
        if not gated and len(weights) > 1:
            weights, biases = [torch.cat(weights)], [torch.cat(biases)] if biases else []
        self._multiply = kernels.multiply
        self._panels = kernels.pack(weights)
        self._bias = kernels.pack(biases) if biases else None
        self._outputs, inputs = weights[0].shape
        self._call = _Product(
            panels=self._panels.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            outputs=self._outputs,
            inputs=inputs,
            gated=gated,
        )
        self._address = ctypes.addressof(self._call)

    def into(self, x: Tensor, out: Output) -> Tensor:
        return self._run(x, None, out.whole)

    def onto(self, total: Tensor, x: Tensor) -> Tensor:
        return self._run(x, total.data_ptr(), total)

    def of(self, x: Tensor) -> Tensor:
        return self._run(x, None, x.new_empty((len(x), self._outputs)))

    def _run(self, x: Tensor, total: int | None, out: Tensor) -> Tensor:
        call = self._call
        call.x, call.total, call.out, call.tokens = x.data_ptr(), total, out.data_ptr(), len(x)
        call.threads = torch.get_num_threads()
        self._multiply(self._address)
        return out
