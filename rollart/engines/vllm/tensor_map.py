"""Maps the tensors of a version to files of this machine that vLLM's workers can map. Nothing is read or copied."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollart.core.errors import RollartError
from rollart.weights.manifest import Manifest, TensorPart

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
_OUTPUT = "lm_head.weight"
_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class FilePiece:
    """`count` elements of a tensor from `start` on, in its flat order, at byte `offset` of a file."""

    file: int
    offset: int
    start: int
    count: int


@dataclass(slots=True)
class TensorMap:
    """In the form that `rollart_extension` reads."""

    files: list[str] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, dtype: str, shape: Iterable[int], pieces: Iterable[FilePiece]) -> None:
        flat = [[piece.file, piece.offset, piece.start, piece.count] for piece in pieces]
        self.tensors.append({"name": name, "dtype": dtype, "shape": list(shape), "pieces": flat})

    def tie(self) -> None:
        """Names the embedding as the output layer too: vLLM may keep a copy there, which it would not update."""
        named = {tensor["name"]: tensor for tensor in self.tensors}
        embedding = next((tensor for name, tensor in named.items() if name.endswith("embed_tokens.weight")), None)
        if embedding is not None and _OUTPUT not in named:
            self.tensors.append(embedding | {"name": _OUTPUT})

    def arguments(self) -> dict[str, Any]:
        return {"files": self.files, "tensors": self.tensors}


def in_shards(shards: Sequence[tuple[Path, Manifest]]) -> TensorMap:
    """A version of the weight store: the data file and the manifest of each of its shards."""
    mapped = TensorMap([str(path) for path, _ in shards])
    pieces: dict[str, list[FilePiece]] = {}
    parts: dict[str, TensorPart] = {}
    aliases: dict[str, str] = {}
    for number, (_, manifest) in enumerate(shards):
        aliases |= manifest.aliases
        for piece in manifest.pieces:
            part = parts[piece.part.tensor] = piece.part
            pieces.setdefault(part.tensor, []).append(FilePiece(number, piece.offset, part.start, part.count))
    for name, owner in [*zip(parts, parts, strict=True), *aliases.items()]:
        mapped.add(name, parts[owner].dtype, parts[owner].shape, pieces[owner])
    return mapped


def in_folder(folder: Path) -> TensorMap:
    """The weights of a Hugging Face folder. Raises RollartError."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RollartError(f"{folder} has no weights in safetensors format")
    mapped = in_safetensors(files)
    config = folder / "config.json"
    if config.is_file() and json.loads(config.read_text()).get("tie_word_embeddings"):
        mapped.tie()
    return mapped


def in_safetensors(files: Iterable[Path]) -> TensorMap:
    mapped = TensorMap()
    for number, path in enumerate(files):
        mapped.files.append(str(path.absolute()))
        for name, entry, data in _headers(path):
            dtype = _DTYPES.get(entry["dtype"])
            if dtype is None:
                raise RollartError(f"{path}: tensor {name} has the unknown type {entry['dtype']}")
            begin, end = entry["data_offsets"]
            piece = FilePiece(number, data + begin, 0, (end - begin) // _BYTES[dtype])
            mapped.add(name, dtype, entry["shape"], [piece])
    return mapped


def _headers(path: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Name and entry of each tensor of a safetensors file, and the offset of the data."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    aliases = json.loads(header.pop("__metadata__", {}).get("aliases", "{}"))
    header |= {name: header[owner] for name, owner in aliases.items()}
    for name, entry in header.items():
        yield name, entry, 8 + size
