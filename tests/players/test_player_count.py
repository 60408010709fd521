"""How many players a run gets, and which of its tasks they play."""

import os

import pytest
from pydantic import ValidationError

from rollart.config import RunFile
from rollart.players.pool import played_tasks, player_count
from rollart.players.service import share_of

TASK = {"name": "a", "env": "rollart.envs.addition:Addition"}
AGENT = {"name": "b", "agent": {"function": "rollart.agents.demo:play"}}


def run_file(tasks: list[dict[str, object]], **sections: object) -> RunFile:
    return RunFile.model_validate({"model": {"tiny": {}}, "tasks": tasks, **sections})


@pytest.mark.parametrize(
    ("processes", "cores", "players"), [(64, 64, 0), (256, 64, 0), (512, 2, 0), (512, 64, 2), (100_000, 64, 32)]
)
def test_auto_is_one_for_256_environments_on_half_of_the_cores(
    processes: int, cores: int, players: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert player_count(run_file([TASK], environments={"processes": processes})) == players


def test_a_run_file_that_says_how_many_gets_them() -> None:
    assert player_count(run_file([TASK], rollout={"players": 3})) == 3
    assert player_count(run_file([TASK], rollout={"players": 0}, environments={"processes": 9_000})) == 0


def test_agents_are_played_by_the_controller() -> None:
    run = run_file([TASK, AGENT], rollout={"players": 2}, training={"batch_groups": 2})
    assert played_tasks(run) == {"a"}
    assert player_count(run_file([AGENT], rollout={"players": 2})) == 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"players": 2, "preset": "sync"}}, "turn by turn"),
        ({"rollout": {"players": 2}, "ledger": {"control": True}}, "records one process"),
    ],
)
def test_what_needs_one_process_refuses_players(sections: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        run_file([TASK], **sections)


def test_runs_that_need_one_process_have_none_by_default() -> None:
    many = {"processes": 100_000}
    assert player_count(run_file([TASK], environments=many, rollout={"preset": "sync"})) == 0
    assert player_count(run_file([TASK], environments=many, ledger={"control": True})) == 0


def test_players_share_the_environments() -> None:
    shares = share_of(run_file([TASK], environments={"processes": 10, "hedges": 8, "warm": 0}).environments, 4)
    assert (shares.processes, shares.hedges, shares.warm) == (3, 2, 0)
