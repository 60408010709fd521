"""A verifiers environment, trained with verifiers' own training client. Needs its family: `make test-agents`."""

import asyncio
from pathlib import Path
from statistics import mean

import pytest

from rollart.app import preflight
from rollart.core.errors import ConfigError
from rollart.core.event_log import read_events
from rollart.envs import families
from rollart.fleet import controller as controller
from rollart.observe.metrics import measure
from rollart.rollout.ledger import SqliteLedger

EXAMPLE = Path(__file__).parents[2] / "examples" / "verifiers.yaml"
SMALL = ["evaluation.every=0", "evaluation.final_episodes=1"]
STEPS, EPISODES = 10, 8


def test_without_the_family_the_error_asks_to_name_it(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(EXAMPLE.read_text().replace("    family: verifiers\n", ""))
    with pytest.raises(ConfigError, match="give the task `family: verifiers`"):
        preflight.load_run(tmp_path / "run.yaml")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(families.installed("verifiers") is None, reason="the family is not there; run: make test-agents")
def test_a_verifiers_environment_is_learnt_on_the_tokens_of_its_own_renderer(tmp_path: Path) -> None:
    asyncio.run(controller.train(preflight.load_run(EXAMPLE, SMALL), tmp_path))
    shot = measure(read_events(tmp_path / "events"))
    assert shot.step == STEPS and shot.trained == STEPS * EPISODES and not shot.drops
    rewards = [point.rewards["digits"] for point in shot.history]
    assert mean(rewards[-3:]) > 2 * mean(rewards[:3])  # of 57 letters 10 are digits
    reported = shot.task("digits").agent
    # Two turns of one conversation each, but for answers that its renderer, given their text, would write otherwise.
    assert reported["completions"] >= 2 * STEPS * EPISODES and reported["undelivered"] == 0
    assert reported["forks"] <= reported["mismatches"]
    for trajectory in SqliteLedger.open_readonly(tmp_path / "ledger.sqlite").scored(1):
        assert not {"system", "user"} & {message.role for message in trajectory.turns[0].messages}  # it sent tokens
