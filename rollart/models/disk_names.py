"""The names and shapes that a model's weights have on disk, where they differ from those in memory.

transformers keeps the experts of a layer in one tensor, `[experts, 2 x inner, hidden]` for gate and up; files, and
engines that load them, have a matrix per expert. Each of those is one run of the flat order of the tensor in memory, so
cutting a tensor into them, or a part of it that a rank holds, moves nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
)

from rollart.core.errors import RollartError


@dataclass(frozen=True, slots=True)
class DiskTensor:
    """A tensor on disk: those elements of a tensor in memory that come from `start` on in its flat order."""

    name: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


class DiskNames:
    """Of a transformers model; from the table by which transformers itself loads and saves it."""

    def __init__(self, model: Any) -> None:
        known = get_model_conversion_mapping(model, add_legacy=False)[::-1]
        reverse = [each.reverse_transform() for each in known if not isinstance(each, PrefixChange)]
        self._architecture = type(model).__name__
        self._renamed = [each for each in reverse if isinstance(each, WeightRenaming)]
        self._split = [each for each in reverse if isinstance(each, WeightConverter)]

    def of(self, name: str, shape: Sequence[int]) -> list[DiskTensor]:
        """What a tensor of the model is on disk. Raises RollartError for a form that is not known here."""
        for converter in self._split:
            first, matched = converter.rename_source_key(name)
            if matched is not None:
                return self._experts(name, first, converter, shape)
        return [DiskTensor(apply_renamings(name, self._renamed), tuple(shape))]

    def _experts(self, name: str, first: str, converter: Any, shape: Sequence[int]) -> list[DiskTensor]:
        targets = converter.target_patterns
        load = [operation.reverse_op for operation in converter.operations[::-1]]
        merges = bool(load) and isinstance(load[0], MergeModulelist) and load[0].dim == 0
        joins = [isinstance(each, Concatenate) and each.dim == 1 for each in load[1:]]
        whole = len(shape) == 3 and not shape[1] % len(targets) and all("*" in target for target in targets)
        if not (merges and whole and joins == [True] * (len(targets) > 1)):
            raise RollartError(
                f"{self._architecture} has {name} on disk in a form that cannot be published; "
                "choose a model whose files have one matrix per expert"
            )
        rows, columns = shape[1] // len(targets), shape[2]
        found: list[DiskTensor] = []
        for expert in range(shape[0]):
            for target in targets:
                each = first.replace(targets[0], target).replace("*", str(expert))
                start = len(found) * rows * columns
                found.append(DiskTensor(apply_renamings(each, self._renamed), (rows, columns), start))
        return found

    def merged(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """`tensors`, named as on disk, under the names that they have in memory, which have these `shapes`; those of
        experts are copies. Names that are in `shapes`, and names that are not known, stay as they are."""
        rest = dict(tensors)
        for name, shape in shapes.items():
            parts = self.of(name, shape)
            if name in rest or not any(part.name in rest for part in parts):
                continue
            found = {part: rest.pop(part.name, None) for part in parts}
            wrong = [part.name for part, tensor in found.items() if tensor is None or tensor.shape != part.shape]
            if len(parts) > 1 and wrong:
                raise RollartError(
                    f"the weights lack {', '.join(wrong[:3])}, or have other shapes; publish the same model"
                )
            whole = [tensor for tensor in found.values() if tensor is not None]
            rest[name] = whole[0] if len(parts) == 1 else torch.cat(whole).view(tuple(shape))
        return rest


def cut(parts: Sequence[DiskTensor], values: Tensor, start: int) -> Iterator[tuple[DiskTensor, Tensor, int]]:
    """Which elements of which tensors on disk are `values`, a run of the flat order from `start` on; with each, where
    it begins in the tensor on disk.

    >>> parts = [DiskTensor("a", (2, 2), 0), DiskTensor("b", (2, 2), 4)]
    >>> [(part.name, values.tolist(), at) for part, values, at in cut(parts, torch.arange(3, 6), 3)]
    [('a', [3], 3), ('b', [4, 5], 0)]
    """
    flat, stop = values.reshape(-1), start + values.numel()
    for part in parts:
        low, high = max(start, part.start), min(stop, part.stop)
        if low < high:
            yield part, flat[low - start : high - start], low - part.start
