"""A verifiers environment, trained with verifiers' own training client. Needs its family: `make test-agents`."""

import asyncio
from pathlib import Path

import pytest

from rollart import run as controller
from rollart import runfile
from rollart.envs import families
from rollart.errors import ConfigError
from rollart.observe.log import read_events
from rollart.observe.metrics import measure
from rollart.rollout.ledger import Ledger

EXAMPLE = Path(__file__).parents[2] / "examples" / "verifiers.yaml"
SMALL = ["training.steps=1", "training.batch_groups=1", "training.group_size=3", "environments.slots=3"]
SMALL += ["evaluation.every=0", "evaluation.final_episodes=1"]


def test_without_the_family_the_run_file_is_told_to_name_it(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(EXAMPLE.read_text().replace("    family: verifiers\n", ""))
    with pytest.raises(ConfigError, match="give the task `family: verifiers`"):
        runfile.load(tmp_path / "run.yaml")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(families.installed("verifiers") is None, reason="the family is not there; run: make test-agents")
def test_a_verifiers_environment_trains_on_the_tokens_of_its_own_renderer(tmp_path: Path) -> None:
    asyncio.run(controller.train(runfile.load(EXAMPLE, SMALL), tmp_path))
    shot = measure(read_events(tmp_path / "events.jsonl"))
    assert shot.step == 1 and shot.trained == 3 and not shot.drops
    told = shot.task("digits").agent
    # Two turns of one conversation each, but for answers that its renderer, given their text, would write otherwise.
    assert told["completions"] == 2 * 3 and told["undelivered"] == 0
    assert told["forks"] <= told["mismatches"]
    for trajectory in Ledger.open_readonly(tmp_path / "ledger.sqlite").scored(1):
        assert not {"system", "user"} & {message.role for message in trajectory.turns[0].messages}  # it sent tokens
