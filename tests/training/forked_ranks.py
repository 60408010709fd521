"""The ranks of a trainer as forked processes: the group is real, and torch is imported only once."""

import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from rank_processes import DEADLINE_S, free_address

from rollart.config import TrainingConfig
from rollart.training.learner import Learner, Shutdown
from rollart.training.ranks import RankAddress, Ranks
from rollart.training.trainer import Trainer

T = TypeVar("T")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["rollart.training.service", "transformers.models.auto.modeling_auto"])


def on_ranks(ranks: int, folder: Path, config: TrainingConfig, work: Callable[[Trainer], T]) -> T:
    """The result of `work` on a trainer with this number of ranks, in the layout of `config`."""
    address = free_address()
    ours, theirs = _context.Pipe()
    processes = [
        _context.Process(target=_rank, args=(RankAddress(rank, ranks, address), folder, config, work, theirs))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        assert ours.poll(DEADLINE_S)
        result: T = pickle.loads(ours.recv_bytes())
        for process in processes:
            process.join(DEADLINE_S)
        assert [process.exitcode for process in processes] == [0] * ranks
        return result
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(
    place: RankAddress, folder: Path, config: TrainingConfig, work: Callable[[Trainer], T], answer: Connection
) -> None:
    layout = config.parallel.layout(place.ranks)
    ranks = Ranks.join(place, patience=DEADLINE_S, layout=layout)
    if place.rank > 0:
        Learner(folder, config, ranks).follow()
        return
    trainer = Trainer(folder, config, ranks=ranks)
    answer.send_bytes(pickle.dumps(work(trainer)))
    trainer.notify(Shutdown())
