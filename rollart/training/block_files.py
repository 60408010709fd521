"""Files of blocks: what each rank has of the tensors of a checkpoint, to be read by any other layout.

Each is a safetensors file. The entry `blocks` of its metadata has, for every tensor in it, the shape of the whole
tensor, the offset of the block in that, and a checksum. Every element is in exactly one file. A reader maps the files
into memory and reads only what overlaps the block that it wants; `damaged` reads whole files.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollart.core.errors import RollartError
from rollart.training.shards import Block, block

FILES = "rank-*.safetensors"


def file_name(rank: int) -> str:
    return FILES.replace("*", f"{rank:05d}")


class BlockPosition(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    checksum: str = ""


_Positions = dict[str, BlockPosition]


def write_blocks(path: Path, blocks: Mapping[str, Block]) -> None:
    """Raises OSError."""
    positions = {name: BlockPosition(part.shape, part.offset, checksum(part.values)) for name, part in blocks.items()}
    metadata = {"blocks": msgspec.json.encode(positions).decode()}
    try:
        save_file({name: part.values for name, part in blocks.items()}, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def checksum(tensor: Tensor) -> str:
    """Of a tensor in the memory of the host, contiguous."""
    return xxhash.xxh3_64_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)


def damaged(paths: Iterable[Path]) -> str:
    """What is wrong with the first block whose contents are not those that were written; nothing if none is."""
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                positions = msgspec.json.decode((file.metadata() or {})["blocks"], type=_Positions)
                for name, position in positions.items():
                    if position.checksum and checksum(file.get_tensor(name)) != position.checksum:
                        return f"{path} is damaged: the contents of {name} have changed since they were written"
        except (OSError, SafetensorError, KeyError, ValueError, msgspec.DecodeError) as error:
            return f"{path} is damaged ({error})"
    return ""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A block in a file that covers `begin` to `end` of the tensor."""

    file: Any
    begin: tuple[int, ...]
    end: tuple[int, ...]


class BlockReader:
    """All blocks in a folder. Raises RollartError if a file is damaged."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, ExitStack()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        try:
            for path in sorted(folder.glob(FILES)):
                self._add(path)
        except BaseException:
            self.close()
            raise

    def _add(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, "pt"))
            positions = msgspec.json.decode((file.metadata() or {})["blocks"], type=_Positions)
            for name, position in positions.items():
                sizes = file.get_slice(name).get_shape()
                end = tuple(at + size for at, size in zip(position.offset, sizes, strict=True))
                if self._shapes.setdefault(name, position.shape) != position.shape:
                    raise ValueError(f"{name} has another shape than in other files")
                self._pieces.setdefault(name, []).append(_Piece(file, position.offset, end))
        except (OSError, SafetensorError, KeyError, ValueError, msgspec.DecodeError) as error:
            raise RollartError(f"{path} is damaged ({error}); use an older checkpoint") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the whole tensors, by name."""
        return self._shapes

    def incomplete(self) -> Iterator[str]:
        """The names of tensors with elements that no file has, or several."""
        for name, shape in self._shapes.items():
            found = sum(prod(map(int.__sub__, piece.end, piece.begin)) for piece in self._pieces[name])
            if found != prod(shape):
                yield name

    def read(self, name: str, offset: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A part of a tensor. Raises RollartError if some of it is in no file."""
        end = tuple(map(int.__add__, offset, sizes))
        made: Tensor | None = None
        found = 0
        for piece in self._pieces[name]:
            low, high = tuple(map(max, offset, piece.begin)), tuple(map(min, end, piece.end))
            if any(first >= last for first, last in zip(low, high, strict=True)):
                continue
            there = tuple(slice(a - at, b - at) for a, b, at in zip(low, high, piece.begin, strict=True))
            here = tuple(slice(a - at, b - at) for a, b, at in zip(low, high, offset, strict=True))
            values = piece.file.get_slice(name)[there] if there else piece.file.get_tensor(name)
            found += values.numel()
            if found == prod(sizes) and made is None:
                return values  # type: ignore[no-any-return]
            made = torch.empty(sizes, dtype=values.dtype) if made is None else made
            made[here] = values
        if made is None or found != prod(sizes):
            raise RollartError(f"{self._folder} is damaged: parts of {name} are in no file; use an older checkpoint")
        return made

    def whole(self, name: str) -> Tensor:
        shape = self._shapes[name]
        return self.read(name, (0,) * len(shape), shape)

    def fill(self, name: str, tensor: Tensor) -> Tensor:
        """Copy what this rank has of a tensor into it, and return it."""
        part = block(tensor)
        if part.values.numel():
            part.values.copy_(self.read(name, part.offset, tuple(part.values.shape)))
        return tensor
