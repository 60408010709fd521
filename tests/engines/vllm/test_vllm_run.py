"""Whole runs on vLLM servers, as a user starts them."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from vllm_fleet import NEEDS_VLLM, PYTHON, network

from rollart.app import preflight
from rollart.core.event_log import EventLog, read_events
from rollart.core.events import AnyEvent, EngineSwapped, ServiceEnded, StepDone
from rollart.core.types import Trajectory
from rollart.fleet import controller as controller
from rollart.fleet.checkpoints import Checkpoints
from rollart.rollout.ledger import SqliteLedger
from rollart.training.export import export_model

pytestmark = [pytest.mark.slow, NEEDS_VLLM, pytest.mark.timeout(1800)]

RUN = f"""
name: served
seed: 1
model: {{tiny: {{hidden: 64, layers: 2, heads: 2, kv_heads: 1, context: 256}}}}
vllm: {{python: {PYTHON}}}
tasks:
  - {{name: reader, env: "benchmarks.paced:Shaped", args: {{turns: 3, characters: 40}}, max_turns: 3,
     reward: "vllm_rewards:letters", max_context: 200, sampling: {{max_tokens: 4, temperature: 0.8}}}}
  - {{name: writer, env: "benchmarks.paced:Shaped", args: {{turns: 1, characters: 10}}, max_context: 250,
     reward: "vllm_rewards:letters", sampling: {{max_tokens: 200}}}}
pools:
  policy: {{role: generate, device: cpu, engine: vllm}}
engine: {{max_batch: 32, kv_megabytes: 64}}
training: {{steps: 6, batch_groups: 4, group_size: 4, lr: 3.0e-3}}
environments: {{processes: 16}}
rollout: {{trajectory_deadline: 1200}}
evaluation: {{every: 0, final_episodes: 2}}
checkpoint: {{every: 1, keep: 100}}
"""


def servers() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if any("vllm.entrypoints" in word for word in process.cmdline())
    ]


def made_by(folder: Path) -> dict[int, Any]:
    """The weights of each version, from the run's checkpoints."""
    models = {0: folder / "start"}
    for version in Checkpoints(folder / "checkpoints").versions():
        models[version] = folder / f"export-{version}"
        export_model(folder / "checkpoints" / f"{version:06d}", models[version])
    return {version: network(path) for version, path in models.items()}


@torch.inference_mode()
def gaps(trajectory: Trajectory, versions: dict[int, Any]) -> Iterator[float]:
    """How far each logprob is from that of a plain forward pass with the weights of its token's version."""
    context: list[int] = []
    for turn in trajectory.turns:
        context += turn.prompt
        for version in set(turn.versions):
            ids = torch.tensor([context + list(turn.tokens)])
            logits = versions[version](ids).logits[0, len(context) - 1 : -1].float() / trajectory.temperature
            picked = logits.log_softmax(-1).gather(1, torch.tensor(turn.tokens).unsqueeze(1)).squeeze(1)
            for expected, got, own in zip(picked.tolist(), turn.logprobs, turn.versions, strict=True):
                if own == version:
                    yield abs(expected - got)
        context += turn.tokens


def test_a_run_trains_on_vllm_through_the_loss_of_its_server_and_every_logprob_is_of_its_version(
    tmp_path: Path,
) -> None:
    path, folder = tmp_path / "run.yaml", tmp_path / "run"
    path.write_text(RUN)
    killed: list[int] = []

    def watch(log: EventLog) -> None:
        def on_event(event: AnyEvent) -> None:
            if isinstance(event, StepDone) and event.version == 3 and not killed:
                for process in servers():
                    killed.append(process.pid)
                    process.send_signal(signal.SIGKILL)

        log.subscribe(on_event)

    summary = asyncio.run(controller.train(preflight.load_run(path, []), folder, on_log=watch))
    assert (summary["version"], summary["phase"]) == (6, "finished")
    events = list(read_events(folder / "events"))
    [ended] = [event for event in events if isinstance(event, ServiceEnded) and event.role == "generate"]
    assert killed and "the vLLM server ended with signal SIGKILL" in ended.reason
    assert {event.version for event in events if isinstance(event, EngineSwapped)} >= {1, 2, 6}
    versions = made_by(folder)
    norms = {
        version: float(sum(weight.abs().sum() for weight in one.state_dict().values()))
        for version, one in versions.items()
    }
    assert len(set(norms.values())) == 7, "a step left the weights as they were"
    with closing(SqliteLedger.open_readonly(folder / "ledger.sqlite")) as ledger:
        trajectories = ledger.scored(1000)
    reported = [gap for trajectory in trajectories for gap in gaps(trajectory, versions)]
    assert len(reported) > 1000 and max(reported) <= 1e-4
    mixed = [turn for one in trajectories for turn in one.turns if len(set(turn.versions)) > 1]
    assert mixed, "no request was in flight at a weight update"
    assert not servers()


def test_a_wrong_python_ends_the_run_with_one_sentence_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.replace(str(PYTHON), "/nowhere/python"))
    command = [sys.executable, "-m", "rollart.app.cli", "train", str(path), "--run-dir", str(tmp_path / "run")]
    here = Path(__file__).parent  # where the reward is
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=here)
    assert ended.returncode == 2
    assert "there is no Python at /nowhere/python; `make vllm`" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
