"""Loads a run file and checks that what it names exists on this machine: model folder, modules, packages, families."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TypeVar

from rollart.app import images
from rollart.config import INVOKERS, AlgorithmConfig, EnvironmentsConfig, RunFile, TaskConfig, import_check
from rollart.config.loading import read, validated
from rollart.config.yaml_tree import KeyPath, Tree
from rollart.core import event_log
from rollart.core.errors import ConfigError, EnvironmentFailed, RollartError
from rollart.engines import backends
from rollart.envs import families
from rollart.envs.dataset import DatasetTask
from rollart.hardware.layout import misfits
from rollart.hardware.layout_choice import candidates, parallel_of
from rollart.models import hub
from rollart.models.folder import model_problem
from rollart.placement.workload import model_config, model_shape
from rollart.sandbox.providers import is_remote, missing_key
from rollart.training.optimizers import OPTIMIZERS
from rollart.warmup.conversations import conversations_problem
from rollart.warmup.pairs import NO_PAIRS, pairs_problem

T = TypeVar("T")
SANDBOXED = ("rollart.envs.terminal", "rollart.rewards.execution")  # modules whose code runs in a sandbox


def load_run(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    need_model: bool = True,
    weights: bool = True,
    only_task: str | None = None,
    here: bool = True,
) -> RunFile:
    """The run file with `overrides` (`a.b.c=value`) applied. Raises ConfigError with one sentence per problem. With
    `only_task`, the requirements of the other tasks are not checked. A model of the hub is downloaded unless it is in
    the cache, and its folder becomes `model.path`; without `weights`, only what describes it. Not `here`: the run is
    for other machines, so what only they need is not checked."""
    tree = read(path, overrides)
    run = validated(tree, RunFile)
    if need_model and run.model.id and not run.model.path:
        folder = _at(tree, ("model",), lambda: hub.model_folder(str(run.model.id), run.model.revision, weights=weights))
        run = run.model_copy(update={"model": run.model.model_copy(update={"path": folder})})
    problems = list(_missing(run, tree, need_model, only_task, here=here))
    if problems:
        raise ConfigError("\n".join(problems))
    if need_model and run.model.path and "lr" not in (tree.value.get("training") or {}):
        lr = run.training.usual_lr(model_shape(run).parameters)
        run = run.model_copy(update={"training": run.training.model_copy(update={"lr": lr})})
    return run


def _missing(run: RunFile, tree: Tree, need_model: bool, only_task: str | None, *, here: bool) -> Iterator[str]:
    """What the values themselves cannot show: files, modules and packages that are not there."""
    if need_model and run.model.path and (problem := model_problem(run.model.path)):
        yield f"{tree.place(('model', 'path'))}: model.path {str(run.model.path)!r} {problem}"
    elif need_model and run.model.path and (senses := _senses(run.model.path)):
        what = f"{run.model.id or run.model.path} is a multimodal model (its config.json has `{senses}`)"
        yield f"{tree.place(('model',))}: model: {what}; rollart trains models of text only"
    for name, pool in run.pools.items() if need_model and here else ():
        if pool.model and not pool.urls and (problem := model_problem(Path(pool.model))):
            where = f"{tree.place(('pools', name, 'model'))}: pools.{name}.model {pool.model!r}"
            yield f"{where} {problem}; a {pool.role} behind an API needs `urls`"
    if need_model and here and only_task is None and run.cluster is None and not _torch_has_cuda():
        for role, key, device in (
            ("train", "training", run.training.device),
            ("generate", "engine", run.engine.device),
        ):
            if device == "cuda" and not any(pool.role == role for pool in run.pools.values()):
                what = f"{key}.device is cuda, but torch here is a build for CPUs"
                yield f"{tree.place((key, 'device'))}: {what}: install one for your GPU, or set it to cpu"
    if wrong := _impossible_layout(run):
        yield f"{tree.place(('training', 'parallel'))}: training.parallel: {wrong}"
    warmup = run.model.warmup
    if warmup and warmup.conversations and (wrong := conversations_problem(warmup.conversations)):
        yield f"{tree.place(('model', 'warmup', 'conversations'))}: model.warmup.conversations: {wrong}"
    if run.preference.pairs and (wrong := pairs_problem(run.preference)):
        yield f"{tree.place(('preference', 'pairs'))}: preference.pairs: {wrong}"
    if run.measured and not event_log.exists(run.measured / "events"):
        where = f"{tree.place(('measured',))}: measured {str(run.measured)!r}"
        yield f"{where} is not the folder of a run: it has no event log"
    for key, wrong in _algorithm_problems(run.training.algorithm):
        yield f"{tree.place(('training', 'algorithm', key))}: training.algorithm.{key} {wrong}"
    for index, task in enumerate(run.tasks):
        for key, wrong in _algorithm_problems(task.algorithm) if task.algorithm else ():
            yield f"{tree.place(('tasks', index, 'algorithm', key))}: tasks.{task.name}.algorithm.{key} {wrong}"
    if wrong := OPTIMIZERS.problem(run.training.optimizer):
        yield f"{tree.place(('training', 'optimizer'))}: training.optimizer {wrong}"
    yield from (f"{tree.place(path)}: {wrong}" for path, wrong in backends.problems(run, here=here))
    hosts = run.pools_of("environment").values()
    remote = all(pool.urls for pool in hosts) and not (warmup and warmup.per_task) and only_task is None
    for index, task in enumerate(run.tasks):
        if only_task in (None, task.name):
            for key, wrong in (*_missing_for_task(task, remote), *(_missing_sandbox(task) if here else ())):
                yield f"{tree.place(('tasks', index, key))}: tasks.{task.name}.{key} {wrong}"


def _torch_has_cuda() -> bool:
    """Whether its build has CUDA, without importing it, which takes seconds."""
    found = find_spec("torch")
    version = Path(str(found.origin)).with_name("version.py") if found is not None else None
    if version is None or not version.is_file():
        return True  # it will say so itself
    return re.search(r"^cuda\b.*= *['\"]", version.read_text(), re.MULTILINE) is not None


def check_stage(run: RunFile, stage: str) -> None:
    """Raises ConfigError if the run file lacks what a stage (`rollart.train`) learns from."""
    if stage == "sft" and run.model.warmup is None:
        raise ConfigError("the run file has no model.warmup, so there is nothing to learn without RL")
    if stage in ("dpo", "reward-model") and run.preference.pairs is None:
        raise ConfigError(NO_PAIRS)


def _senses(folder: Path) -> str:
    """What its config says of images, sound or video; empty for a model of text."""
    about = json.loads((folder / "config.json").read_text())
    return next((key for key in ("vision_config", "audio_config", "video_config") if about.get(key)), "")


def try_resets(run: RunFile, *, only_bugs: bool = False) -> None:
    """One reset of each environment in its worker, if that is on this machine. Raises ConfigError with a sentence for
    each that fails; with `only_bugs`, for those that would fail again."""
    tasks = [task for task in run.tasks if task.agent is None and task.opponent is None]  # which is not started yet
    if run.cluster is not None or any(pool.urls for pool in run.pools_of("environment").values()) or not tasks:
        return
    if problems := asyncio.run(_failed_resets(tasks, run.environments, only_bugs)):
        raise ConfigError("\n".join(problems))


async def _failed_resets(tasks: Sequence[TaskConfig], config: EnvironmentsConfig, only_bugs: bool) -> list[str]:
    from rollart.envs.pool import EnvironmentPool
    from rollart.workers.worker_process import CallRaised

    async def trial(task: TaskConfig) -> str | None:
        try:
            async with pool.claim(task.name, held_out=False) as environment:
                await environment.reset(0)
        except EnvironmentFailed as error:
            cause = error.__cause__
            if not only_bugs or (isinstance(cause, CallRaised) and cause.bug):
                return f"tasks.{task.name}.env: a trial reset of {task.env} failed: {cause or error}"
        return None

    pool = EnvironmentPool(tasks, config.model_copy(update={"processes": 1, "hedges": 0, "warm": 0, "retries": 0}))
    try:
        await pool.start()
        return [problem for problem in await asyncio.gather(*map(trial, tasks)) if problem]
    finally:
        await pool.close()


def _algorithm_problems(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    default = AlgorithmConfig()
    if all(getattr(algorithm, key) == getattr(default, key) for key in ("loss", "advantage", "correction")):
        return  # the tables import numpy, which a check of a file with defaults need not
    from rollart.training.advantages import ADVANTAGES
    from rollart.training.corrections import CORRECTIONS
    from rollart.training.losses import LOSSES

    problems = [("loss", LOSSES.problem(algorithm.loss)), ("advantage", ADVANTAGES.problem(algorithm.advantage))]
    problems += [("correction", CORRECTIONS.problem(name)) for name in algorithm.correction.use]
    yield from ((key, wrong) for key, wrong in problems if wrong)


def advice(run: RunFile) -> Iterator[str]:
    """What is allowed and yet probably a mistake."""
    if run.model.tiny or not run.model.path:
        return
    parameters = model_shape(run).parameters
    usual = run.training.usual_lr(parameters)
    if run.training.lr > 10 * usual:
        what = (
            f"adapters of a model of {parameters:.2g}"
            if run.training.lora
            else f"a pretrained model of {parameters:.2g}"
        )
        yield f"training.lr is {run.training.lr:g}; {what} parameters usually learns at about {usual:g}"


def _at(tree: Tree, path: KeyPath, work: Callable[[], T]) -> T:
    """A ConfigError of `work` names the line of the key."""
    try:
        return work()
    except ConfigError as error:
        raise ConfigError(f"{tree.place(path)}: {error}") from error


def _dataset_problem(task: TaskConfig) -> str | None:
    """Reads the first row of each side: a wrong column is reported here and not by every episode."""
    if task.dataset is None:
        return None
    try:
        for held_out in (False, True):
            sample = DatasetTask(task.dataset.model_dump(), held_out)
            sample.reset(0)
            sample.step("")
    except (ConfigError, ValueError, OSError) as error:
        return str(error)
    return None


def _impossible_layout(run: RunFile) -> str | None:
    """Why the trainer's ranks cannot divide the model so. A model that is not here is not checked."""
    (pool,) = run.pools_of("train").values()
    try:
        layout = run.training.parallel.layout(pool.count)
    except RollartError as error:
        return str(error)
    if not run.model.tiny and not (run.model.path and (run.model.path / "config.json").is_file()):
        return None
    model = model_config(run)
    if not (wrong := next(misfits(layout, model), None)):
        return None
    able = [parallel_of(each) for each in islice(candidates(pool.count, model), 1, 4)]
    others = " or ".join(f"{{{', '.join(f'{key}: {size}' for key, size in each.items())}}}" for each in able)
    return f"{wrong}; possible are, for instance, {others}" if others else f"{wrong}; leave it out"


def _missing_for_task(task: TaskConfig, remote: bool) -> Iterator[tuple[str, str]]:
    """`remote`: all environments run on hosts that cannot be inspected from here."""
    targets: dict[str, str | None] = {} if remote else {"env": task.env, "player": task.player}
    if wrong := _dataset_problem(task):
        yield "dataset", f"cannot be used: {wrong}"
    if task.agent is not None:
        targets["agent"] = task.agent.function
        for folder in (task.agent.files, *task.agent.mounts):
            if folder and not folder.is_dir():
                yield "agent", f"needs the folder {str(folder)!r}, which is not there"
    if INVOKERS[task.reward.invoker].imported:  # others may need what is not installed here
        targets["reward"] = task.reward.function
    for key, target in targets.items():
        if target and (wrong := _missing_target(task, key, target)):
            yield key, wrong
    if task.family and not remote and (wrong := families.problem(task.family)):
        yield "family", wrong


def _missing_sandbox(task: TaskConfig) -> Iterator[tuple[str, str]]:
    """What runs in a sandbox needs bubblewrap, an engine for its image, or a key; without it every episode fails."""
    image = images.image_of(task)
    where = "agent" if task.agent is not None else "args"
    if is_remote(image):
        if wrong := missing_key(str(image), task.pass_env, os.environ):
            yield where, wrong
    elif wrong := images.missing(task):
        yield where, wrong
    if shutil.which("bwrap") is not None:
        return
    hint = "runs in a sandbox, which needs bubblewrap; install it: `apt-get install bubblewrap`"
    if task.agent is not None and task.agent.command and not image:
        yield "agent", hint
    for key, target in (("env", task.env), ("reward", task.reward.function)):
        if target and target.partition(":")[0].startswith(SANDBOXED):
            yield key, hint


def _missing_target(task: TaskConfig, key: str, target: str) -> str | None:
    if task.family and key != "reward":
        family = families.installed(task.family)
        return import_check.problem(target, family.packages) if family else None
    wrong = import_check.problem(target)
    name = families.family_of(target)
    if wrong and "needs the package" in wrong and name and key != "reward":
        return f"needs packages that are not installed here; give the task `family: {name}`"
    return wrong
