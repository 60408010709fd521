"""A whole run whose trajectories are played by processes of their own, one of which is killed."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from benchmarks.audit import audit
from rollart.app import preflight
from rollart.core.event_log import read_events
from rollart.core.events import AnyEvent, BatchTaken, Published, ServiceEnded, ServiceStarted, StepDone, TrajectoryEnded
from rollart.core.types import Outcome
from rollart.fleet import controller
from rollart.fleet.control_services import loop_factory
from rollart.rollout.ledger import SqliteLedger

pytestmark = pytest.mark.slow

RUN = """
name: played
seed: 3
model: {tiny: {hidden: 64, layers: 2, context: 256}}
tasks:
  - {name: guess_number, env: "rollart.envs.guess_number:GuessNumber", max_turns: 4, max_context: 160,
     sampling: {max_tokens: 5}}
  - {name: frozen_lake, env: "rollart.envs.frozen_lake:FrozenLake", args: {max_actions: 3}, max_turns: 3,
     max_context: 160, weight: 2, sampling: {max_tokens: 3, temperature: 0.8}}
rollout: {extra_members: 1, players: 2}
training: {steps: 3, batch_groups: 3, group_size: 4}
evaluation: {final_episodes: 2}
checkpoint: {every: 2}
"""


def test_a_killed_player_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    (tmp_path / "played.yaml").write_text(RUN)
    run = preflight.load_run(tmp_path / "played.yaml", [])
    pids: dict[str, int] = {}

    def watch(event: AnyEvent) -> None:
        if isinstance(event, ServiceStarted):
            pids.setdefault(event.name, event.pid)
        if isinstance(event, Published) and event.version == 1:
            os.kill(pids["player-1"], signal.SIGKILL)

    folder = tmp_path / "run"
    with asyncio.Runner(loop_factory=loop_factory(run)) as runner:
        summary = runner.run(controller.train(run, folder, on_log=lambda log: log.subscribe(watch)))
    assert summary["version"] == 3
    events = list(read_events(folder / "events"))
    assert [event.name for event in events if isinstance(event, ServiceStarted)].count("player-0") == 1
    ended = [event for event in events if isinstance(event, ServiceEnded) and event.role == "player"]
    assert [event.name for event in ended] == ["player-1"]
    lost = [event for event in events if isinstance(event, TrajectoryEnded) and "player-1 was lost" in event.reason]
    assert all(event.outcome is Outcome.ENGINE_FAILED for event in lost)
    taken = [event for event in events if isinstance(event, BatchTaken)]
    assert [event.groups for event in taken] == [{"guess_number": 1, "frozen_lake": 2}] * 3
    assert all(age <= 1 for event in taken for age in event.staleness)
    # Engine and trainer agree on every logprob: what the players packed is what was sampled.
    first = next(event for event in events if isinstance(event, StepDone))
    assert first.values["logprob_gap"] < 1e-4
    assert SqliteLedger.open_readonly(folder / "ledger.sqlite").group_states()["consumed"] == 9
    assert audit(folder) == []
