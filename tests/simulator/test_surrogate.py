"""The coarse copy of the simulator that fits use, against the simulator."""

from pathlib import Path

import pytest

from benchmarks import surrogate
from rollart.simulator import paper
from rollart.simulator.scenario import Scenario, load
from rollart.simulator.simulation import simulate

pytestmark = pytest.mark.skipif(not surrogate.available(), reason="no C++ compiler")

SCENARIO = """
name: small
model: {name: qwen3-8b}
rollout: {preset: rollart, alpha: 1, extra_members: 1}
pools:
  trainer: {role: train, device: H800, count: 8}
  fast: {role: generate, device: H800, count: 4, engine: vllm}
  wide: {role: generate, device: H20, count: 2, engine: vllm}
routing: {policy: declared}
environments: {processes: 96, reset_deadline: 600, step_deadline: 600, hedges: 0}
training: {steps: 9, batch_groups: 16, group_size: 8, dtype: bfloat16, recompute: full}
tasks:
  - {name: chat, max_turns: 12, max_context: 32768, sampling: {max_tokens: 512}, affinity: prefill}
  - {name: sum, max_turns: 1, max_context: 32768, sampling: {max_tokens: 8000}, affinity: decode}
simulate:
  log: "off"
  workloads:
    chat:
      turns: {uniform: [4, 12]}
      prompt: 800
      observation: 300
      response: {lognormal: {mean: 100, sigma: 0.5}}
      reset: 5
      step: 2
    sum: {response: {lognormal: {mean: 1500, sigma: 0.4}}, reward: {lognormal: {mean: 2, sigma: 0.3}}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    return path


def variant(file: Path, preset: str) -> Scenario:
    scenario = load(file, ["simulate.weights={method: collective}"] if preset != "rollart" else [])
    return scenario.with_preset(preset)


@pytest.mark.parametrize("preset", surrogate.PRESETS)
def test_steps_take_as_long_as_simulated_ones(file: Path, preset: str) -> None:
    scenario = variant(file, preset)
    coarse, real = surrogate.simulate(scenario), simulate(scenario)
    assert coarse.step_s == pytest.approx(real.step_s, rel=0.1)
    assert coarse.train_s == pytest.approx(real.train_s, rel=0.05)
    assert coarse.tokens_per_s == pytest.approx(real.tokens_per_s, rel=0.12)


def test_a_window_and_a_slower_trainer_change_it_as_they_change_the_simulation(file: Path) -> None:
    changes = {"window": "simulate.workloads.chat.window=400", "trainer": "simulate.constants.train_efficiency=0.1"}
    plain = load(file)
    for override in changes.values():
        changed = load(file, [override])
        coarse = surrogate.simulate(changed).step_s / surrogate.simulate(plain).step_s
        assert coarse == pytest.approx(simulate(changed).step_s / simulate(plain).step_s, rel=0.1)


def test_shares_of_a_step_are_those_of_a_colocated_simulation() -> None:
    scenario = load(paper.FOLDER / "step_breakdown.yaml", ["training.batch_groups=32", "simulate.one_in=4"])
    coarse, real = surrogate.simulate(scenario), simulate(scenario)
    for part in ("generate", "train", "reset"):
        assert coarse.exposed[part] == pytest.approx(real.exposed[part], abs=0.04)
