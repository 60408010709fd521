"""The weight store: every version of the policy is one safetensors file in shared memory.

Invariants: a version appears all at once (written aside, then renamed) and never changes; a reader maps the file, so
retiring a version takes its name away but not the pages of those who already hold it. Any number of processes may read
while one publishes. Nothing here needs torch until tensors move, so a controller can retire without loading it.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rollart.errors import RollartError

if TYPE_CHECKING:
    from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")
SUFFIX = ".safetensors"


class MissingVersion(RollartError):
    """The version was never published here, or has been retired."""


class WeightStore:
    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    @classmethod
    def shared(cls, name: str) -> "WeightStore":
        """In the machine's shared memory if it has any, else in its folder for temporary files."""
        base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        return cls(base / f"rollart-{name}")

    def publish(self, version: int, tensors: Mapping[str, "Tensor"]) -> None:
        """Tensors that share their memory are written once; their other names are kept in the file's header."""
        from safetensors.torch import save_file

        first: dict[tuple[int, tuple[int, ...]], str] = {}
        aliases: dict[str, str] = {}
        for name, tensor in tensors.items():
            owner = first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
            if owner != name:
                aliases[name] = owner
        unique = {name: tensor.detach().contiguous() for name, tensor in tensors.items() if name not in aliases}
        path = self._path(version)
        aside = path.with_suffix(f".{os.getpid()}.part")
        try:
            save_file(unique, aside, metadata={"aliases": json.dumps(aliases)})
            aside.rename(path)
        except OSError as error:
            raise RollartError(f"version {version} could not be written to {self.root}: {error}") from error
        finally:
            aside.unlink(missing_ok=True)

    def load(self, version: int) -> dict[str, "Tensor"]:
        """Mapped, not read: pages come in when they are touched. Raises MissingVersion."""
        from safetensors import safe_open

        path = self._path(version)
        try:
            with safe_open(path, framework="pt") as file:
                tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                aliases: dict[str, str] = json.loads((file.metadata() or {}).get("aliases", "{}"))
        except FileNotFoundError:
            raise MissingVersion(
                f"version {version} is not in the weight store {self.root}; it has {self.versions() or 'none'}"
            ) from None
        return tensors | {name: tensors[owner] for name, owner in aliases.items()}

    def versions(self) -> list[int]:
        return sorted(int(path.stem) for path in self.root.glob(f"*{SUFFIX}"))

    def latest(self) -> int | None:
        return max(self.versions(), default=None)

    def retire(self, keep: Collection[int]) -> list[int]:
        """Remove the versions older than the newest of `keep` and not in it; returns them."""
        newest = max(keep, default=0)
        old = [version for version in self.versions() if version < newest and version not in keep]
        for version in old:
            self._path(version).unlink(missing_ok=True)
        return old

    def clear(self) -> None:
        for path in (*self.root.glob(f"*{SUFFIX}"), *self.root.glob("*.part")):
            path.unlink()

    def close(self) -> None:
        """Remove the store and all its versions. Readers keep what they have mapped."""
        if self.root.exists():
            self.clear()
            with contextlib.suppress(OSError):  # whatever else is in there is not ours
                self.root.rmdir()

    def _path(self, version: int) -> Path:
        return self.root / f"{version:08d}{SUFFIX}"
