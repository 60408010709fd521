"""Agents of third-party frameworks, as they are, in whole runs. Need their family: `make test-agents`."""

import asyncio
from pathlib import Path

import pytest

from rollart.app import preflight
from rollart.config import VllmConfig
from rollart.core.event_log import read_events
from rollart.envs import families
from rollart.fleet import controller as controller
from rollart.observe.metrics import measure

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents.yaml"
SMALL = ["training.steps=2", "training.batch_groups=3", "training.group_size=4", "environments.processes=6"]
SMALL += ["evaluation.every=0", "evaluation.final_episodes=3"]
POOLS = "pools={trainer: {role: train, device: cpu}, policy: {role: generate, device: cpu, engine: vllm}}"
VLLM = [POOLS, "engine.kv_megabytes=256"]
FRAMEWORKS = ("pydantic_ai", "openai_agents", "smolagents")
there = pytest.mark.skipif(
    families.installed("agents") is None, reason="the family is not there; run: make test-agents"
)


def train(folder: Path, more: list[str]) -> None:
    asyncio.run(controller.train(preflight.load_run(EXAMPLE, [*SMALL, *more]), folder))
    shot = measure(read_events(folder / "events"))
    assert shot.step == 2 and shot.trained == 2 * 3 * 4
    assert not shot.drops
    for name in FRAMEWORKS:
        reported = shot.task(name).agent
        assert reported["completions"] >= reported["segments"] > 0
        assert reported["undelivered"] == 0
        # smolagents puts ``` after every answer: the history that it sends is not what was sampled.
        assert (reported["forks"] > 0) == (name == "smolagents")


@there
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_agents_of_three_frameworks_train_together_with_the_embedded_engine(tmp_path: Path) -> None:
    train(tmp_path, [])


@there
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not VllmConfig().interpreter().exists(), reason="vLLM is not there; run: make vllm")
def test_agents_of_three_frameworks_train_together_with_vllm(tmp_path: Path) -> None:
    train(tmp_path, VLLM)
