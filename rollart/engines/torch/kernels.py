"""What a step does besides matrix products, one call each: norms, rotation, KV, attention, activation, sampling.

On a CPU with a C compiler the calls go to `kernels.c`, compiled with `products.c` once per machine, dtype and head size
(a second) and kept in the user's cache folder. Everywhere else, GPUs included, they are torch operators. Both compute
the same.
"""

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rollart.core.native import native_library
from rollart.engines.torch.attention import attend_span, write_kv
from rollart.engines.torch.kv_rows import CopyHeads, KVLayout
from rollart.engines.torch.panels import PanelKernels
from rollart.engines.torch.products import Affine, MatVec
from rollart.engines.torch.sampler import draw
from rollart.engines.torch.step import StepInputs

# From this many queries of a row on, torch's attention is faster than one pass over the keys per query.
LONG_CHUNK = 48


@dataclass(slots=True)
class AttentionSettings:
    """Of one layer. `q_norm` and `k_norm` are weights over a head."""

    heads: int
    scale: float
    window: int | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


@dataclass(slots=True)
class Rotation:
    """[positions, dim / 2] each, in float."""

    cos: Tensor
    sin: Tensor


class Kernels(Protocol):
    copy_heads: CopyHeads | None  # None: by torch
    panels: PanelKernels | None  # None: products by torch

    @property
    def matvec(self) -> MatVec | None:
        """None: by torch."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """`out` = silu(gate) * up, which are the halves of `gate_up`."""
        ...

    def attend(
        self,
        qkv: Tensor,
        step: StepInputs,
        layer: AttentionSettings,
        rotation: Rotation,
        kv: tuple[Tensor, Tensor],
        out: Tensor,
        wanted: Tensor | None,
    ) -> None:
        """Normalises and rotates the queries and keys of `qkv` [tokens, heads + 2 kv heads, dim], stores keys and
        values in the rows of KV, and attends to them: `out` is [tokens, heads, dim], of the `wanted` tokens only if
        they are given."""
        ...

    def draw(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """As `sampler.draw`."""
        ...


class TorchKernels:
    copy_heads: CopyHeads | None = None
    panels: PanelKernels | None = None
    matvec: None = None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        out.copy_(F.rms_norm(x, (x.shape[-1],), weight, eps))

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        gate, up = gate_up.chunk(2, -1)
        torch.mul(F.silu(gate), up, out=out)

    def attend(
        self,
        qkv: Tensor,
        step: StepInputs,
        layer: AttentionSettings,
        rotation: Rotation,
        kv: tuple[Tensor, Tensor],
        out: Tensor,
        wanted: Tensor | None,
    ) -> None:
        kv_heads = kv[0].shape[1]
        query, key, value = qkv.tensor_split([layer.heads, layer.heads + kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = F.rms_norm(query, (query.shape[2],), layer.q_norm, layer.eps)
            key = F.rms_norm(key, (key.shape[2],), layer.k_norm, layer.eps)
        cos, sin = (table[step.positions[0]].unsqueeze(1).to(qkv.dtype) for table in (rotation.cos, rotation.sin))
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        write_kv(step, kv, key, value)
        attended = out if wanted is None else torch.empty_like(query)
        for span in step.spans:
            attended[span.tokens] = attend_span(
                query=query, keys=kv[0], values=kv[1], span=span, scaling=layer.scale, window=layer.window
            )
        if wanted is not None:
            torch.index_select(attended, 0, wanted, out=out)

    def draw(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        return draw(logits, uniform)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class _Shape(ctypes.Structure):
    """`struct shape` of kernels.c."""

    _fields_ = (
        ("kv_heads", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("capacity", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class CompiledKernels:
    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._norm, self._silu, self._matvec = library.rms_norm, library.silu_mul, library.matvec
        self._store, self._attend, self._draw = library.store, library.attend, library.draw
        pointer, long, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._norm.argtypes = (*(pointer,) * 3, long, number, ctypes.c_float, number)
        self._silu.argtypes = (*(pointer,) * 2, long, number, number)
        self._matvec.argtypes = (*(pointer,) * 5, long, long, number)
        self._store.argtypes = (*(pointer,) * 2, long, *(pointer,) * 8)
        self._attend.argtypes = (*(pointer,) * 2, long, *(pointer,) * 5)
        self._draw.argtypes = (pointer, long, long, *(pointer,) * 4)
        self.panels = PanelKernels.of(library) if dtype == torch.float32 else None
        self.copy_heads: CopyHeads | None = library.copy_heads
        library.copy_heads.argtypes = (pointer, long, long, pointer, long, long, long, long, long)
        library.copy_heads.restype = None
        for function in (self._norm, self._silu, self._matvec, self._store, self._attend, self._draw):
            function.restype = None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        tokens, size = x.shape
        self._norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), tokens, size, eps, torch.get_num_threads())

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        tokens, size = out.shape
        self._silu(gate_up.data_ptr(), out.data_ptr(), tokens, size, torch.get_num_threads())

    def matvec(self, x: Tensor, affine: Affine, total: Tensor | None, out: Tensor) -> None:
        weight, bias = affine
        optional = (None if tensor is None else tensor.data_ptr() for tensor in (bias, total))
        rows, size = weight.shape
        self._matvec(x.data_ptr(), weight.data_ptr(), *optional, out.data_ptr(), rows, size, torch.get_num_threads())

    def attend(
        self,
        qkv: Tensor,
        step: StepInputs,
        layer: AttentionSettings,
        rotation: Rotation,
        kv: tuple[Tensor, Tensor],
        out: Tensor,
        wanted: Tensor | None,
    ) -> None:
        keys, values = kv
        _, kv_heads, capacity, dim = keys.shape
        window = layer.window or 0
        shape = _Shape(kv_heads, torch.get_num_threads(), capacity, window, layer.eps, layer.scale)
        where = ctypes.addressof(shape)
        all_tokens, positions, rows = qkv.data_ptr(), step.positions.data_ptr(), step.rows.data_ptr()
        stored = keys.data_ptr(), values.data_ptr()
        norms = (None if norm is None else norm.data_ptr() for norm in (layer.q_norm, layer.k_norm))
        tables = rotation.cos.data_ptr(), rotation.sin.data_ptr()
        self._store(where, all_tokens, len(qkv), positions, rows, *tables, *norms, *stored)
        if wanted is not None:
            qkv, place, row = qkv[wanted], step.positions[0, wanted], step.rows[wanted]
            queries = qkv.data_ptr(), len(wanted), place.data_ptr(), row.data_ptr()
            self._attend(where, *queries, *stored, out.data_ptr())
            return
        size, width, wide = qkv.element_size(), qkv.shape[1] * dim, layer.heads * dim
        for span in step.spans:
            if span.queries >= LONG_CHUNK:
                out[span.tokens] = attend_span(
                    query=qkv[:, : layer.heads],
                    keys=keys,
                    values=values,
                    span=span,
                    scaling=layer.scale,
                    window=layer.window,
                )
                continue
            first, count = span.tokens.start, span.tokens.stop - span.tokens.start
            self._attend(
                where,
                all_tokens + first * width * size,
                count,
                positions + first * 8,
                rows + first * 8,
                *stored,
                out.data_ptr() + first * wide * size,
            )

    def draw(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        if logits.dtype != self._dtype or not logits.is_contiguous():
            return draw(logits, uniform)
        rows, vocabulary = logits.shape
        tokens, logprobs = torch.empty(rows, dtype=torch.long), torch.empty(rows)
        scratch = torch.empty(vocabulary)
        made = (one.data_ptr() for one in (uniform, scratch, tokens, logprobs))
        self._draw(logits.data_ptr(), rows, vocabulary, *made)
        return tokens, logprobs


def kernels_for(layout: KVLayout, heads: int) -> Kernels:
    """Compiled ones where that is possible, for a model with KV of this layout."""
    if layout.device.type != "cpu" or layout.dtype not in (torch.float32, torch.bfloat16) or layout.dim % 2:
        return TorchKernels()
    dtype = ("BFLOAT16",) if layout.dtype == torch.bfloat16 else ()
    definitions = (f"DIM={layout.dim}", f"GROUP={heads // layout.heads}", *dtype)
    library = native_library("rollart.engines.torch", ("kernels.c", "products.c"), definitions)
    return TorchKernels() if library is None else CompiledKernels(library, layout.dtype)
