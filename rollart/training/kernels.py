"""`kernels.c` from Python: the parts of a decoder layer that are not matrix products, on tensors of one dtype."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from rollart.core.native import native_library

LANES = 16  # the size of a head is a multiple of it
POINTERS = (
    *("qkv", "cos", "sin", "q_norm", "k_norm", "spans", "out", "rotated", "totals"),
    *("grad", "to_qkv", "to_rotated", "to_values", "to_norms"),
)


class _Attention(ctypes.Structure):
    """`struct attention` of kernels.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in ("tokens", "sequences", "longest")),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "threads")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Of attention. `eps` is that of the norms of queries and keys."""

    heads: int
    kv_heads: int
    size: int
    scale: float
    eps: float


@dataclass(frozen=True, slots=True)
class Sequences:
    """What attention has to know of a pass: rotations [tokens, size / 2] in float, and `Packed.spans`."""

    cos: Tensor
    sin: Tensor
    spans: Tensor
    longest: int


class LayerKernels:
    """Compiled for one size of heads and one dtype. `of` returns None where that is not possible."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, long, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
        self._norm, self._norm_back = library.norm_forward, library.norm_backward
        self._gate, self._gate_back = library.gate_forward, library.gate_backward
        self._attend, self._attend_back = library.attention_forward, library.attention_backward
        self._norm.argtypes = (*(pointer,) * 4, long, number, real, number)
        self._norm_back.argtypes = (*(pointer,) * 7, long, number, number)
        self._gate.argtypes = (*(pointer,) * 2, long, number, number)
        self._gate_back.argtypes = (*(pointer,) * 4, long, number, number)
        for function in (self._norm, self._norm_back, self._gate, self._gate_back):
            function.restype = None
        for function in (self._attend, self._attend_back):
            function.argtypes, function.restype = (ctypes.POINTER(_Attention),), number

    @classmethod
    @cache
    def of(cls, size: int, dtype: torch.dtype) -> "LayerKernels | None":
        if size % LANES or dtype not in (torch.float32, torch.bfloat16):
            return None
        definitions = (f"DIM={size}", *(("BFLOAT16",) if dtype == torch.bfloat16 else ()))
        library = native_library("rollart.training", ("kernels.c",), definitions)
        return None if library is None else cls(library)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The RMS norm of [tokens, size], and the scale of every token, for the backward pass."""
        tokens, size = x.shape
        out, scales = torch.empty_like(x), x.new_empty(tokens, dtype=torch.float32)
        self._norm(*_pointers(x, weight, out, scales), tokens, size, eps, torch.get_num_threads())
        return out, scales

    def norm_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor, more: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the input, with `more` added, and of the weight."""
        (tokens, size), threads = x.shape, torch.get_num_threads()
        to_x, to_weight = torch.empty_like(x), x.new_zeros(threads, size, dtype=torch.float32)
        self._norm_back(*_pointers(grad, x, weight, scales, more, to_x, to_weight), tokens, size, threads)
        return to_x, to_weight.sum(0).to(weight.dtype)

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [tokens, 2 * size]."""
        tokens, size = len(gate_up), gate_up.shape[1] // 2
        inner = gate_up.new_empty(tokens, size)
        self._gate(*_pointers(gate_up, inner), tokens, size, torch.get_num_threads())
        return inner

    def gate_backward(self, gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of `gate_up`, and what `gate` made of it."""
        to_gate_up, inner = torch.empty_like(gate_up), torch.empty_like(grad)
        where = _pointers(gate_up, grad, to_gate_up, inner)
        self._gate_back(*where, len(grad), grad.shape[1], torch.get_num_threads())
        return to_gate_up, inner

    def attend(
        self, qkv: Tensor, norms: Sequence[Tensor], shape: HeadShape, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """Attention of [tokens, (heads + 2 KV heads) * size] within every sequence, after its queries and keys are
        normalised, if there are `norms` of both, and rotated. Also the logarithms of its totals, for the backward
        pass. Tokens that are in no sequence, at the end, get 0."""
        tokens = len(qkv)
        out = qkv.new_zeros(tokens, shape.heads * shape.size)
        totals = qkv.new_empty(tokens, shape.heads, dtype=torch.float32)
        rotated = qkv.new_empty(tokens, (shape.heads + shape.kv_heads) * shape.size, dtype=torch.float32)
        call = _call(qkv, norms, shape, sequences, out=out, totals=totals, rotated=rotated)
        _check(self._attend(ctypes.byref(call)))
        return out, totals

    def attend_backward(
        self,
        grad: Tensor,
        out: Tensor,
        totals: Tensor,
        qkv: Tensor,
        norms: Sequence[Tensor],
        shape: HeadShape,
        sequences: Sequences,
    ) -> tuple[Tensor, list[Tensor]]:
        """Gradients of `qkv` and of the norms."""
        tokens, threads = len(qkv), torch.get_num_threads()
        to_qkv = torch.empty_like(qkv)
        rotated = qkv.new_empty(tokens, (shape.heads + shape.kv_heads) * shape.size, dtype=torch.float32)
        to_rotated = torch.zeros_like(rotated)
        to_values = rotated.new_zeros(tokens, shape.kv_heads * shape.size)
        to_norms = rotated.new_zeros(threads, 2, shape.size)
        call = _call(
            *(qkv, norms, shape, sequences),
            out=out,
            totals=totals,
            rotated=rotated,
            grad=grad,
            to_qkv=to_qkv,
            to_rotated=to_rotated,
            to_values=to_values,
            to_norms=to_norms,
        )
        _check(self._attend_back(ctypes.byref(call)))
        return to_qkv, [total.to(norm.dtype) for total, norm in zip(to_norms.sum(0), norms, strict=False)]


def _pointers(*tensors: Tensor) -> list[int]:
    assert all(tensor.is_contiguous() for tensor in tensors)
    return [tensor.data_ptr() for tensor in tensors]


def _call(
    qkv: Tensor, norms: Sequence[Tensor], shape: HeadShape, sequences: Sequences, **buffers: Tensor
) -> _Attention:
    named = {"qkv": qkv, "cos": sequences.cos, "sin": sequences.sin, "spans": sequences.spans, **buffers}
    named |= dict(zip(("q_norm", "k_norm"), norms, strict=False))
    return _Attention(
        **dict(zip(named, _pointers(*named.values()), strict=True)),
        tokens=len(qkv),
        sequences=len(sequences.spans),
        longest=sequences.longest,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        threads=torch.get_num_threads(),
        eps=shape.eps,
        scale=shape.scale,
    )


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("there is no memory left for the attention of a pass")
