"""A trainer whose ranks cannot all come back, on virtual time."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollart.config import RunFile
from rollart.core.errors import ServiceError
from rollart.core.events import Event, Warned
from rollart.fleet.trainer_supervisor import TrainerSupervisor
from rollart.launch.launcher import Command
from rollart.placement.plan import with_ranks
from rollart.simulator.clock import run as on_virtual_time

TINY = {"architecture": "qwen3_moe", "hidden": 64, "layers": 2, "heads": 2, "kv_heads": 2, "context": 256}


class Launched(Exception):
    pass


class SmallCluster:
    """Has room for a given number of ranks."""

    def __init__(self, room: int) -> None:
        self._room = room
        self.asked: list[tuple[int, dict[str, int]]] = []

    async def launch_together(self, commands: Sequence[Command], request: Any) -> Any:
        self.asked.append((len(commands), commands[0].spec["config"]["parallel"]))
        if len(commands) > self._room:
            raise ServiceError(f"no room for {len(commands)} ranks")
        raise Launched

    async def launch(self, command: Command, request: Any) -> Any:
        return await self.launch_together([command], request)


def run_with(parallel: Any, ranks: int = 4) -> RunFile:
    return RunFile.model_validate(
        {
            "model": {"tiny": TINY},
            "tasks": [{"name": "t", "env": "json:loads", "max_context": 200}],
            "pools": {"trainer": {"role": "train", "device": "cpu", "count": ranks}},
            "training": {"parallel": parallel},
        }
    )


def restart(run: RunFile, room: int, folder: Path) -> tuple[SmallCluster, list[Event]]:
    cluster, events = SmallCluster(room), list[Event]()
    bindings: Any = [SimpleNamespace(worker=f"trainer-{rank}", choices=("cpu",), units=1.0) for rank in range(4)]
    launcher: Any = cluster
    sink: Any = SimpleNamespace(emit=events.append)
    supervisor = TrainerSupervisor(
        run,
        bindings,
        launcher=launcher,
        spec=lambda: {"model": str(folder)},
        sink=sink,
        logs=folder,
        smaller=partial(with_ranks, run),
    )
    with pytest.raises(Launched):
        on_virtual_time(supervisor.restart())
    return cluster, events


def test_all_ranks_are_asked_for_first(tmp_path: Path) -> None:
    cluster, events = restart(run_with({"tensor": 2, "expert": 2}), room=4, folder=tmp_path)
    assert [ranks for ranks, _ in cluster.asked] == [4]
    assert not events


def test_a_trainer_without_room_goes_on_with_the_ranks_that_its_layout_allows(tmp_path: Path) -> None:
    cluster, events = restart(run_with({"tensor": 2, "expert": 2}), room=2, folder=tmp_path)
    assert {ranks for ranks, _ in cluster.asked[:-1]} == {4}  # three ranks cannot be tensor 2
    assert cluster.asked[-1][0] == 2
    assert cluster.asked[-1][1]["tensor"] == 2
    assert any(isinstance(event, Warned) and "2 of 4 ranks: tensor 2" in event.message for event in events)


def test_a_layout_that_is_auto_is_chosen_for_the_ranks_that_are_left(tmp_path: Path) -> None:
    cluster, _ = restart(run_with("auto"), room=3, folder=tmp_path)
    assert cluster.asked[-1][0] == 3


def test_fewer_ranks_than_the_layout_needs_are_refused() -> None:
    assert with_ranks(run_with({"tensor": 2, "expert": 2}), 1) is None
    assert with_ranks(run_with({"expert": 4}), 2) is None
    smaller = with_ranks(run_with({"context": 2}), 2)
    assert smaller is not None
    assert str(smaller.training.parallel.layout(2)) == "context 2"
