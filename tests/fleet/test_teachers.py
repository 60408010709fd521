"""Distillation: teachers score what the policy sampled, and a student learns what its teacher knows."""

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from world import Recorder

import rollart
from rollart.config import RunFile, TinyModelConfig
from rollart.core.column import Column
from rollart.core.errors import ConfigError, RewardFailed, ServiceError
from rollart.core.events import AnyEvent, ServiceEnded, ServiceStarted, StepDone, Warned
from rollart.core.types import Sample, TokenRole
from rollart.fleet import teachers as fleet_teachers
from rollart.fleet.teachers import Teachers, prompt_logprobs
from rollart.launch.launcher import Command, ResourceRequest, ServiceHandle
from rollart.launch.local import LocalLauncher
from rollart.models import tiny
from rollart.placement.bindings import Binding

TASK = {"name": "sums", "env": "rollart.envs.addition:Addition", "max_context": 64, "sampling": {"max_tokens": 6}}
MODEL = {"tiny": {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "context": 128}}


def run_file(**more: Any) -> RunFile:
    plain: dict[str, Any] = {
        "model": MODEL,
        "tasks": [TASK],
        "pools": {"wise": {"role": "teacher", "model": "teacher"}},
        "training": {"steps": 2, "batch_groups": 2, "group_size": 2, "algorithm": {"advantage": "opd"}},
        "evaluation": {"every": 0, "final_episodes": 2},
    }
    return RunFile.model_validate({**plain, **more})


def test_the_only_teacher_teaches_all_tasks_unless_one_names_another() -> None:
    run = run_file()
    assert [run.teacher_of(task) for task in run.tasks] == ["wise"]
    pools = {name: {"role": "teacher", "model": name} for name in ("wise", "wiser")}
    tasks = [{**TASK, "teacher": "wiser"}, {**TASK, "name": "more", "teacher": "wise"}]
    run = run_file(pools=pools, tasks=tasks)
    assert [run.teacher_of(task) for task in run.tasks] == ["wiser", "wise"]


def test_a_task_with_an_advantage_of_its_own_needs_no_teacher() -> None:
    rewarded = {**TASK, "name": "more", "algorithm": {"advantage": "grpo"}}
    pools = {name: {"role": "teacher", "model": name} for name in ("wise", "wiser")}
    run = run_file(tasks=[{**TASK, "teacher": "wise"}, rewarded], pools=pools)
    assert [run.teacher_of(task) for task in run.tasks] == ["wise", None]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"tasks": [{**TASK, "teacher": "wize"}]}, "no pool 'wize' of role teacher; did you mean 'wise'"),
        ({"pools": {}}, "advantage opd learns from teachers, and task 'sums' has none"),
        (
            {"pools": {}, "training": {"algorithm": {"loss": "reverse_kl"}}},
            "loss reverse_kl learns from teachers, and task 'sums' has none",
        ),
        ({"pools": {"wise": {"role": "teacher"}}}, "a teacher needs `model`"),
        (
            {"pools": {"wise": {"role": "generate", "model": "m"}}},
            "`model` is for pools of role teacher or judge, not generate",
        ),
    ],
)
def test_a_mistake_is_a_sentence(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        run_file(**more)


def test_prompt_logprobs_of_vllm_are_those_of_the_scored_tokens() -> None:
    rows = [None, {"7": {"logprob": -1.5, "rank": 3}, "9": {"logprob": -0.1, "rank": 1}}, {"8": {"logprob": -0.5}}]
    answer = {"choices": [{"prompt_logprobs": rows}]}
    teaching = prompt_logprobs(answer, [5, 7, 8], [False, True, True])
    assert teaching.logprobs.array.tolist() == [-1.5, -0.5] and teaching.top_ids is None
    with pytest.raises(ServiceError, match="logprobs of 3 tokens, not of 2"):
        prompt_logprobs(answer, [5, 7], [False, True])
    with pytest.raises(ServiceError, match="has no prompt_logprobs"):
        prompt_logprobs({"choices": [{"text": "hello"}]}, [5], [False])


def test_the_likeliest_tokens_of_vllm_are_ranked_without_the_sampled_one() -> None:
    rows = [None, {"7": {"logprob": -3.0}, "9": {"logprob": -0.125}, "4": {"logprob": -2.5}}]
    answer = {"choices": [{"prompt_logprobs": rows}]}
    teaching = prompt_logprobs(answer, [5, 7], [False, True], 2)
    assert teaching.count == 2 and teaching.top_ids is not None and teaching.top_logprobs is not None
    assert teaching.top_ids.array.tolist() == [9, 4] and teaching.top_logprobs.array.tolist() == [-0.125, -2.5]
    with pytest.raises(ServiceError, match="3 of its likeliest tokens, not 4"):
        prompt_logprobs(answer, [5, 7], [False, True], 4)


SAMPLE = Sample(
    id="s",
    task="sums",
    tokens=Column.ints([5, 7, 8]),
    roles=Column.flags([TokenRole.PROMPT, TokenRole.ACTION, TokenRole.ACTION]),
    logprobs=Column.floats([0.0, 0.0]),
    versions=Column.ints([0, 0]),
    reward=0.0,
)


def bound(device: str, url: str = "") -> Binding:
    return Binding(
        pool="wise",
        role="teacher",
        worker="wise-0",
        wanted=device,
        choices=(device,),
        device=device,
        node=url,
        units=0.0,
        threads=0,
        why="",
        url=url,
    )


async def _taught_by(url: str) -> Any:
    run, here = run_file(pools={"wise": {"role": "teacher", "urls": [url], "model": "big"}}), Path()
    teachers = Teachers(run, [bound("auto", url)], student=here, launcher=None, logs=here, sink=None)  # type: ignore[arg-type]
    await teachers.start()
    try:
        return await teachers.teach("sums", [SAMPLE])
    finally:
        await teachers.close()


class LightLauncher(LocalLauncher):
    """Starts teachers without a model, after `refusals` attempts."""

    refusals = 0

    async def launch(self, command: Command, request: ResourceRequest) -> ServiceHandle:
        if self.refusals:
            self.refusals -= 1
            raise ServiceError("its node is not back yet")
        variables = {**command.environment, "PYTHONPATH": str(Path(__file__).parent)}
        return await super().launch(
            replace(command, argv=(*command.argv[:-1], "light_scorer"), environment=variables), request
        )


class Sink(Recorder):
    """Wakes those that wait for events."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = asyncio.Event()

    def emit(self, event: AnyEvent) -> None:
        super().emit(event)
        self.changed.set()

    async def counts(self, kind: type[AnyEvent], number: int) -> None:
        while len(self.of(kind)) < number:
            self.changed.clear()
            await self.changed.wait()


@pytest.mark.slow
def test_trajectories_wait_while_a_teacher_is_started_again_and_only_short_lives_in_a_row_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_teachers, "RETRY_S", 0.0)
    monkeypatch.setattr(fleet_teachers, "MAX_LIVES", 2)
    monkeypatch.setattr(fleet_teachers, "SETTLED_S", 0.0)
    teacher = tiny.make(TinyModelConfig(**MODEL["tiny"]), tmp_path / "teacher", seed=5)
    run = run_file(pools={"wise": {"role": "teacher", "model": str(teacher)}})
    launcher, sink = LightLauncher(), Sink()

    def kill() -> None:
        os.kill(sink.of(ServiceStarted)[-1].pid, signal.SIGKILL)

    async def watch(teachers: Teachers) -> None:
        for lives in (1, 2):
            launcher.refusals = 2 * fleet_teachers.ATTEMPTS
            kill()
            await sink.counts(ServiceEnded, lives)
            (taught,) = await teachers.teach("sums", [SAMPLE])
            assert taught.logprobs.array.tolist() == [-1.0, -1.0] and not launcher.refusals
        monkeypatch.setattr(fleet_teachers, "SETTLED_S", 60.0)
        kill()
        await sink.counts(ServiceStarted, 4)
        kill()

    async def main() -> None:
        teachers = Teachers(run, [bound("cpu")], student=teacher, launcher=launcher, logs=tmp_path, sink=sink)
        try:
            async with asyncio.timeout(120), asyncio.TaskGroup() as group:
                await teachers.start()
                group.create_task(teachers.watch())
                await watch(teachers)
        finally:
            await teachers.close()
            await launcher.close()

    with pytest.RaisesGroup(
        pytest.RaisesExc(ServiceError, match="wise-0 ended 2 times soon after its start"), flatten_subgroups=True
    ):
        asyncio.run(main())
    assert len([event for event in sink.of(Warned) if "is not back yet" in event.message]) == 12


def test_an_endpoint_teaches_and_one_that_fails_is_never_a_lesson(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiohttp import web

    monkeypatch.setattr("rollart.fleet.teachers.RETRY_S", 0.0)

    async def served(status: int) -> Any:
        asked: list[Any] = []

        async def reply(request: web.Request) -> web.Response:
            asked.append(await request.json())
            rows = [None, {"7": {"logprob": -1.5}}, {"8": {"logprob": -0.5}}]
            return web.json_response({"choices": [{"prompt_logprobs": rows}]}, status=status)

        app = web.Application()
        app.router.add_post("/v1/completions", reply)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            return await _taught_by(f"http://127.0.0.1:{port}/v1"), asked
        finally:
            await runner.cleanup()

    (teaching,), asked = asyncio.run(served(200))
    assert teaching.logprobs.array.tolist() == [-1.5, -0.5]
    assert asked[0]["prompt"] == [5, 7, 8] and asked[0]["model"] == "big"
    with pytest.raises(RewardFailed, match=r"no teaching after 3 attempts: .*HTTP 503"):
        asyncio.run(served(503))


@pytest.mark.slow
def test_a_student_is_taught_by_a_model_folder_in_a_pool(tmp_path: Path) -> None:
    teacher = tiny.make(TinyModelConfig(**MODEL["tiny"]), tmp_path / "teacher", seed=5)
    algorithm = {"advantage": "opd", "loss": "reverse_kl", "teacher_top": 3}
    training = {"steps": 2, "batch_groups": 2, "group_size": 2, "algorithm": algorithm}
    run = run_file(pools={"wise": {"role": "teacher", "model": str(teacher)}}, training=training)
    taught = rollart.train(run, folder=tmp_path / "run")
    assert [step.version for step in taught.events(StepDone)] == [1, 2]
    assert "teacher" in {event.role for event in taught.events(ServiceStarted)}
    for trajectory in taught.trajectories(held_out=False):
        (teaching,) = trajectory.teaching
        assert len(teaching.logprobs) == trajectory.action_tokens
        assert teaching.count == 3 and len(teaching.top_ids or ()) == 3 * trajectory.action_tokens
    assert not any(trajectory.teaching for trajectory in taught.trajectories(held_out=True))


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    from rollart.fleet.teachers import _check_vocabulary

    for name, size in (("student", 10), ("teacher", 12)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    with pytest.raises(ConfigError, match="another vocabulary than the policy"):
        _check_vocabulary(tmp_path / "student", tmp_path / "teacher", "wise")
