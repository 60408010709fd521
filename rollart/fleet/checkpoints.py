"""The checkpoints of a run, `checkpoints/000020` for version 20: which are kept, and which is the best.

Invariants: only what the ledger has committed counts; the newest `keep` are never deleted, nor is the best one; a
checkpoint whose evaluation is running stays until the result is there. An evaluation of version v counts for the newest
checkpoint at or before v, since evaluations start when engines have the weights, at any version; that checkpoint may
still be written when the result is there, so each commit looks at the last result again.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import msgspec

from rollart.core.errors import RollartError
from rollart.core.events import Evaluated, EventSink
from rollart.rollout.evaluation import EpisodeRunner, Evaluator
from rollart.rollout.ledger import Ledger
from rollart.rollout.trajectory import RolloutTask
from rollart.training.client import is_checkpoint

BEST = "best.json"


class BestCheckpoint(msgspec.Struct, frozen=True):
    """`version` of the checkpoint, and the means over all tasks of the evaluation at version `evaluated`."""

    version: int
    evaluated: int
    success: float
    reward: float


class Checkpoints:
    """`keep` the newest, and the `best` by evaluation if asked for."""

    def __init__(self, folder: Path, keep: int = 1, *, best: bool = False) -> None:
        self.folder, self._keep, self._best = folder, keep, best
        self._committed = 0
        self._evaluating: list[int] = []
        self._last: tuple[int, float, float] | None = None  # version, success and reward of the last evaluation

    def path(self, version: int) -> Path:
        return self.folder / f"{version:06d}"

    def versions(self) -> list[int]:
        """Of the complete ones, in order."""
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(int(path.name) for path in entries if path.name.isdigit() and is_checkpoint(path))

    def best(self) -> BestCheckpoint | None:
        """Raises RollartError if the record is damaged."""
        try:
            found = msgspec.json.decode((self.folder / BEST).read_bytes(), type=BestCheckpoint)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise RollartError(f"{self.folder / BEST} is damaged ({error}); delete it") from error
        return found if is_checkpoint(self.path(found.version)) else None

    def start(self, version: int) -> None:
        """The run starts or resumes at `version`: remove what a killed one was writing."""
        self._committed, self._last = version, None
        for draft in self.folder.glob(".*.part"):
            shutil.rmtree(draft, ignore_errors=True)

    def commit(self, version: int) -> None:
        """The ledger has committed `version`: delete what is not kept. Later ones belong to a discarded history."""
        self._committed = version
        self._credit()
        self._prune()

    def _prune(self) -> None:
        there = self.versions()
        kept = set([version for version in there if version <= self._committed][-self._keep :])
        kept |= {candidate for version in self._evaluating if (candidate := self._evaluated_by(version)) is not None}
        if self._best and (best := self.best()) is not None:
            kept.add(best.version)
        for version in set(there) - kept:
            shutil.rmtree(self.path(version))

    def _evaluated_by(self, version: int) -> int | None:
        """The checkpoint that an evaluation of `version` counts for."""
        return max((each for each in self.versions() if each <= min(version, self._committed)), default=None)

    @contextmanager
    def evaluating(self, version: int) -> Iterator[None]:
        if not self._best:
            yield
            return
        self._evaluating.append(version)
        try:
            yield
        finally:
            self._evaluating.remove(version)

    def evaluated(self, version: int, results: Sequence[Evaluated]) -> None:
        """All tasks were evaluated at `version`. Of two equally good checkpoints the later one is the best."""
        self._last = version, fmean(one.success for one in results), fmean(one.reward for one in results)
        self._credit()

    def _credit(self) -> None:
        """The last evaluation to the checkpoint that it counts for, if that is the best."""
        if not self._best or self._last is None:
            return
        version, success, reward = self._last
        candidate, best = self._evaluated_by(version), self.best()
        if candidate is None or (best and (best.version, best.evaluated) == (candidate, version)):
            return
        if best is None or (success, reward) >= (best.success, best.reward):
            record = BestCheckpoint(candidate, version, success, reward)
            draft = self.folder / f".{BEST}"
            draft.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
            draft.rename(self.folder / BEST)


class CheckpointEvaluator(Evaluator):
    """An evaluator whose results decide which checkpoint is the best."""

    def __init__(
        self,
        tasks: Sequence[RolloutTask],
        runner: EpisodeRunner,
        ledger: Ledger,
        sink: EventSink,
        checkpoints: Checkpoints,
        *,
        samples: int = 1,
        available: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(tasks, runner, ledger, sink, samples=samples, available=available)
        self._checkpoints = checkpoints

    async def run(self, version: int, episodes: int, *, label: str = "eval", final: bool = False) -> list[Evaluated]:
        with self._checkpoints.evaluating(version):
            results = await super().run(version, episodes, label=label, final=final)
            if len(results) == len(self._tasks):
                self._checkpoints.evaluated(version, results)
        return results


def find_checkpoint(path: Path, *, best: bool = False) -> Path:
    """A checkpoint, given as its folder or by the run folder that has it: the newest, or the best by evaluation. Raises
    RollartError."""
    if is_checkpoint(path):
        return path
    checkpoints = Checkpoints(path / "checkpoints")
    if best:
        if (found := checkpoints.best()) is None:
            raise RollartError(f"{path} has no best checkpoint; a run keeps one with checkpoint.best: true")
        return checkpoints.path(found.version)
    if not (versions := checkpoints.versions()):
        raise RollartError(f"{path} is neither a checkpoint nor the folder of a run with one")
    return checkpoints.path(versions[-1])
