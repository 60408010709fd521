"""A judge on a vLLM server that the run starts: a pool like any other."""

import asyncio
from pathlib import Path

import pytest
from vllm_fleet import DEADLINE_S, NEEDS_VLLM, PYTHON, START_S, TINY

from rollart.config import RunFile
from rollart.core.events import AnyEvent, ServiceEnded, ServiceStarted
from rollart.core.llm_client import ask
from rollart.fleet.fleet import placement_plan
from rollart.fleet.judges import Judges
from rollart.launch.local import LocalLauncher
from rollart.models import tiny

pytestmark = [pytest.mark.slow, NEEDS_VLLM, pytest.mark.timeout(1800)]

TASK = {"name": "sums", "env": "rollart.envs.addition:Addition", "max_context": 64, "sampling": {"max_tokens": 6}}


class Events(list[AnyEvent]):
    def emit(self, event: AnyEvent) -> None:
        self.append(event)


def test_a_judge_answers_from_a_vllm_server_and_ends_with_the_run(tmp_path: Path) -> None:
    folder = tiny.make(TINY, tmp_path / "model", seed=5)
    run = RunFile.model_validate(
        {
            "model": {"tiny": {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "context": 64}},
            "tasks": [{**TASK, "opponent": "grader"}],
            "pools": {"grader": {"role": "judge", "model": str(folder), "engine": "vllm", "device": "cpu"}},
            "vllm": {"python": str(PYTHON), "start_deadline": START_S},
            "engine": {"max_batch": 8, "kv_megabytes": 64},
        }
    )

    async def judged() -> tuple[list[str], list[str]]:
        launcher, events = LocalLauncher(), Events()
        placed = await placement_plan(run, launcher)
        bindings = [binding for binding in placed.bindings if binding.role == "judge"]
        judges = Judges(run, bindings, launcher=launcher, logs=tmp_path, sink=events)
        try:
            await judges.start()  # an opponent is up before the first move
            url, name = judges.addresses["grader"]
            question, options = [{"role": "user", "content": "Well?"}], {"max_tokens": 5, "temperature": 0}
            said = [
                await asyncio.to_thread(ask, url, name, question, options=options, timeout=DEADLINE_S, whole=False)
                for _ in range(2)
            ]
        finally:
            await judges.close()
            await launcher.close()
        kinds = (ServiceStarted, ServiceEnded)
        return said, [f"{type(event).__name__} {event.role}" for event in events if isinstance(event, kinds)]

    said, services = asyncio.run(judged())
    assert said[0] == said[1] != ""
    assert services == ["ServiceStarted judge", "ServiceEnded judge"]
