"""Whole runs on pools: emulated device classes, trainer ranks, prefill handed over, engines that someone else runs."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollart.app import preflight
from rollart.config import TinyModelConfig
from rollart.core.event_log import read_events
from rollart.core.events import EngineSwapped, Placed, StepDone, TurnDone
from rollart.fleet import controller as controller
from rollart.launch.launcher import ResourceRequest, service_command
from rollart.launch.local import LocalLauncher
from rollart.launch.rpc import ENGINE_KEY
from rollart.models.tiny import make

pytestmark = pytest.mark.slow

RUN = """
name: pooled
seed: 1
model: {tiny: {hidden: 64, layers: 2, context: 256}}
tasks:
  - {name: reader, env: "benchmarks.paced:Shaped", args: {turns: 3, characters: 40}, max_turns: 3, max_context: 200,
     sampling: {max_tokens: 3}}
  - {name: writer, env: "benchmarks.paced:Shaped", args: {turns: 1, characters: 10}, max_context: 60,
     reward: "benchmarks.waiting_reward:letters", sampling: {max_tokens: 24}}
training: {steps: 3, batch_groups: 4, group_size: 4}
environments: {processes: 16}
evaluation: {every: 0, final_episodes: 2}
checkpoint: {every: 2}
"""


def train(folder: Path, more: str, *changes: str) -> dict[str, Any]:
    path = folder / "run.yaml"
    path.write_text(RUN + more)
    return asyncio.run(controller.train(preflight.load_run(path, list(changes)), folder / "run"))


def test_a_mixture_is_trained_with_the_experts_that_its_engine_used(tmp_path: Path) -> None:
    changes = ("model.tiny.architecture=qwen3_moe", "training.replay_experts=true", "training.steps=2")
    assert train(tmp_path, "", *changes)["version"] == 2
    steps = [event.values for event in read_events(tmp_path / "run" / "events", StepDone)]
    assert all(values["experts_replayed"] > 0.9 for values in steps)  # not the last token of a conversation
    assert steps[0]["logprob_gap"] < 1e-4  # all of version 0; later ones are stale too


def test_a_mixed_emulated_fleet_with_ranks_and_disaggregate_trains(tmp_path: Path) -> None:
    summary = train(
        tmp_path,
        "pools:\n"
        "  learning: {role: train, device: cpu, count: 2}\n"
        "  compute: {role: generate, device: H800, emulate: 5000}\n"
        "  bandwidth: {role: generate, device: H20, emulate: 5000}\n"
        "routing: {disaggregate: [compute, bandwidth]}\n",
    )
    assert (summary["version"], summary["phase"]) == (3, "finished")
    assert summary["emulated"] == ["compute: H800 (1/5000)", "bandwidth: H20 (1/5000)"]
    elsewhere = [route for route in summary["routes"] if route["pool"] != "bandwidth: emulated H20 (1/5000)"]
    assert all(set(route["why"]) == {"fallback"} for route in elsewhere)  # while the H20 is below the floor
    assert sum(route["fetched"] for route in summary["routes"]) > 0
    placed = [event for event in read_events(tmp_path / "run" / "events") if isinstance(event, Placed)]
    assert sorted(event.name for event in placed if event.role == "train") == ["learning-0", "learning-1"]
    shown = subprocess.run(
        [sys.executable, "-m", "rollart.app.cli", "show", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "EMULATED devices" in shown
    assert "Routing of requests" in shown


def test_an_engine_that_someone_else_runs_serves_as_a_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same model, and as if on another host: it does not see the memory that the trainer publishes to."""
    model = make(TinyModelConfig(hidden=64, layers=2, context=256), tmp_path / "model", seed=1)

    async def main() -> dict[str, Any]:
        launcher = LocalLauncher()
        monkeypatch.setenv(ENGINE_KEY, launcher.key)
        spec = {"model": str(model), "weights": str(tmp_path / "weights"), "config": {}, "seed": 0, "version": 0}
        engine = await launcher.launch(
            service_command("rollart.engines.torch.service", spec, name="engine", logs=tmp_path), ResourceRequest()
        )
        try:
            path = tmp_path / "run.yaml"
            url = engine.answer["url"]
            more = f"pools:\n  partner: {{role: generate, device: cpu, urls: ['{url}']}}\n"
            text = RUN.replace("model: {tiny: {hidden: 64, layers: 2, context: 256}}", f"model: {{path: {model}}}")
            path.write_text(text + more)
            summary = await controller.train(preflight.load_run(path, []), tmp_path / "run")
            await controller.train(preflight.load_run(path, ["training.steps=1"]), tmp_path / "again")
            return summary
        finally:
            await launcher.close()

    summary = asyncio.run(main())
    assert (summary["version"], summary["phase"]) == (3, "finished")
    later = read_events(tmp_path / "again" / "events")
    assert next(event.version for event in later if isinstance(event, TurnDone)) == 0  # though it was left at 3
    events = list(read_events(tmp_path / "run" / "events"))
    assert {event.engine for event in events if isinstance(event, TurnDone)} == {"partner-0"}
    swaps = [event for event in events if isinstance(event, EngineSwapped)]
    assert {event.transport for event in swaps} == {"http"}
    for swap in swaps:  # all of it from the trainer, and served to others from then on
        assert sum(hop.bytes for hop in swap.hops) == swap.bytes and swap.relay.startswith("http://")
    assert not (tmp_path / "weights").exists()
    assert [place["node"][:7] for place in summary["places"] if place["role"] == "generate"] == ["http://"]
