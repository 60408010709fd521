"""Demonstrations: episodes of observations and actions, in files. Every array is checked before it is used.

An npz file has `observations` [N, O], `actions` [N, A] and the `lengths` of its episodes, which add up to N; without
lengths, it is one episode. HDF5 files are read in the layouts of Minari (a group for each episode) and of D4RL (flat
arrays with `terminals` and `timeouts`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from rollart.core.errors import RollartError
from rollart.robots.suites import sizes_of

Floats = NDArray[np.float32]
HDF5 = (".hdf5", ".h5")
MINARI = "data/main_data.hdf5"  # in the folder of a data set


class DemonstrationError(RollartError):
    """A demonstration file cannot be used."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """`observations` [T, O] and the `actions` [T, A] taken there."""

    observations: Floats
    actions: Floats


def load_for(task: str, path: Path, episodes: int, points: int = 0) -> list[Demonstration]:
    """As `load`, for a task that observes a cloud of `points`, or with 0 the state. Raises DemonstrationError if they
    are not of this task."""
    found, expected = load(path, episodes), sizes_of(task, points)
    if _sizes(found[0]) != expected:
        has, needs = (
            f"observations of {seen} and actions of {done} numbers" for seen, done in (_sizes(found[0]), expected)
        )
        raise DemonstrationError(f"the demonstrations {path} have {has}, but {task} has {needs}")
    return found


def load(path: Path, episodes: int) -> list[Demonstration]:
    """The first `episodes` of a file, of the folder of a Minari data set, or of the npz files in a folder in order of
    their names. Raises DemonstrationError."""
    minari = path / MINARI
    files = [minari] if minari.is_file() else sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        what = "holds no npz file" if path.is_dir() else "does not exist"
        raise DemonstrationError(f"the demonstrations {path}: it {what}; record some with `rollart robots demos`")
    found: list[Demonstration] = []
    for file in files:
        found += _hdf5(file) if file.suffix in HDF5 else _npz(file)
    for number, one in enumerate(found):
        if (one.observations.shape[1], one.actions.shape[1]) != _sizes(found[0]):
            here, first = _sizes(one), _sizes(found[0])
            raise DemonstrationError(f"the demonstrations {path}: episode {number} has sizes {here}, the first {first}")
    if len(found) < episodes:
        raise DemonstrationError(
            f"the demonstrations {path} have {len(found)} episodes, fewer than the {episodes} asked for; "
            "lower demonstrations.episodes or record more"
        )
    return found[:episodes]


def file_of(folder: Path | None, task: str) -> Path:
    """Where a folder has the demonstrations of a task: `adroit-door.npz` for `adroit:door`. Raises
    DemonstrationError."""
    if folder is None:
        raise DemonstrationError(f"{task} has no scripted expert; name a folder of files in `demonstrations.path`")
    return folder / f"{task.replace(':', '-')}.npz"


def save(path: Path, demonstrations: Sequence[Demonstration]) -> None:
    """As one npz file that `load` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        observations=np.concatenate([one.observations for one in demonstrations]),
        actions=np.concatenate([one.actions for one in demonstrations]),
        lengths=np.array([len(one.actions) for one in demonstrations]),
    )


def checked(observations: Any, actions: Any, where: str) -> Demonstration:
    """One episode of arrays from anywhere. Raises DemonstrationError."""
    arrays: list[Floats] = []
    for name, value in (("observations", observations), ("actions", actions)):
        array = np.asarray(value)
        if array.ndim != 2 or array.dtype.kind not in "fiu":
            raise DemonstrationError(f"{where}: {_shape(name, array)}")
        if not np.isfinite(array).all():
            raise DemonstrationError(f"{where}: `{name}` has values that are not finite, first at {_first_bad(array)}")
        arrays.append(array.astype(np.float32))
    seen, done = arrays
    if len(seen) == len(done) + 1:
        seen = seen[:-1]  # Minari has the last observation too
    if len(seen) != len(done) or not len(done):
        raise DemonstrationError(f"{where}: it has {len(seen)} observations and {len(done)} actions; expected as many")
    return Demonstration(seen, done)


def _npz(file: Path) -> list[Demonstration]:
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise DemonstrationError(f"{file} is not an npz file of plain arrays, as numpy.savez writes it") from error
    for name in ("observations", "actions"):
        if name not in arrays:
            have = ", ".join(sorted(arrays)) or "nothing"
            raise DemonstrationError(f"{file} has no array `{name}`; it has {have}")
        if arrays[name].ndim != 2:
            raise DemonstrationError(f"{file}: {_shape(name, arrays[name])}")
    observations, actions = arrays["observations"], arrays["actions"]
    lengths = arrays.get("lengths", np.array([len(actions)]))
    total = int(lengths.sum()) if lengths.dtype.kind in "iu" and lengths.ndim == 1 else -1
    if total != len(actions) or total != len(observations) or (lengths < 1).any():
        raise DemonstrationError(
            f"{file}: `lengths` must be whole numbers that add up to the {len(observations)} observations and "
            f"{len(actions)} actions"
        )
    episodes = enumerate(_cut(observations, actions, lengths))
    return [checked(seen, done, f"{file}, episode {number}") for number, (seen, done) in episodes]


def _cut(observations: Any, actions: Any, lengths: Any) -> Iterator[tuple[Any, Any]]:
    ends = np.cumsum(lengths).tolist()
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        yield observations[start:end], actions[start:end]


def _hdf5(file: Path) -> list[Demonstration]:
    try:
        import h5py
    except ImportError:
        raise DemonstrationError(f"{file} needs the package h5py; install it: pip install 'rollart[hdf5]'") from None
    try:
        with h5py.File(file, "r") as stored:
            groups = sorted((name for name in stored if name.startswith("episode_")), key=lambda name: int(name[8:]))
            if groups:  # Minari
                return [
                    checked(stored[name]["observations"][()], stored[name]["actions"][()], f"{file}, {name}")
                    for name in groups
                ]
            ends = np.asarray(stored["terminals"][()], bool) | np.asarray(stored["timeouts"][()], bool)
            stops = np.flatnonzero(ends) + 1
            lengths = np.diff([0, *stops.tolist()])
            arrays = stored["observations"][()], stored["actions"][()]
            return [checked(seen, done, str(file)) for seen, done in _cut(*arrays, lengths)]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise DemonstrationError(f"{file} is neither a Minari nor a D4RL data set: {error}") from error


def _sizes(one: Demonstration) -> tuple[int, int]:
    return one.observations.shape[1], one.actions.shape[1]


def _shape(name: str, array: NDArray[Any]) -> str:
    return f"`{name}` is {array.dtype} {array.shape}; expected numbers [time, size]"


def _first_bad(array: NDArray[Any]) -> str:
    row, column = np.argwhere(~np.isfinite(array))[0].tolist()
    return f"step {row}, number {column}"
