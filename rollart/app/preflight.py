"""Loads a run file and checks that what it names exists on this machine: model folder, modules, packages, families."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from rollart.config import INVOKERS, RunFile, TaskConfig, TrainingConfig, import_check
from rollart.config.loading import read, validated
from rollart.config.yaml_tree import Tree
from rollart.core.errors import ConfigError, RollartError
from rollart.engines import backends
from rollart.envs import families
from rollart.hardware.layout import misfits
from rollart.hardware.layout_choice import candidates, parallel_of
from rollart.placement.workload import model_config
from rollart.training.advantages import ADVANTAGES
from rollart.training.losses import LOSSES
from rollart.warmup.conversations import conversations_problem


def load_run(
    path: Path, overrides: Sequence[str] = (), *, need_model: bool = True, only_task: str | None = None
) -> RunFile:
    """The run file with `overrides` (`a.b.c=value`) applied. Raises ConfigError with one sentence per problem. With
    `only_task`, the requirements of the other tasks are not checked."""
    tree = read(path, overrides)
    run = validated(tree, RunFile)
    problems = list(_missing(run, tree, need_model, only_task))
    if problems:
        raise ConfigError("\n".join(problems))
    return run


def _missing(run: RunFile, tree: Tree, need_model: bool, only_task: str | None) -> Iterator[str]:
    """What the values themselves cannot show: files, modules and packages that are not there."""
    if need_model and run.model.path and not (run.model.path / "config.json").is_file():
        yield f"{tree.place(('model', 'path'))}: model.path {str(run.model.path)!r} is not a Hugging Face model folder"
    if wrong := _impossible_layout(run):
        yield f"{tree.place(('training', 'parallel'))}: training.parallel: {wrong}"
    warmup = run.model.warmup
    if warmup and warmup.conversations and (wrong := conversations_problem(warmup.conversations)):
        yield f"{tree.place(('model', 'warmup', 'conversations'))}: model.warmup.conversations: {wrong}"
    if run.measured and not (run.measured / "events.jsonl").is_file():
        where = f"{tree.place(('measured',))}: measured {str(run.measured)!r}"
        yield f"{where} is not the folder of a run: it has no events.jsonl"
    for key, registry in (("loss", LOSSES), ("advantage", ADVANTAGES)):
        if wrong := registry.problem(getattr(run.training.algorithm, key)):
            yield f"{tree.place(('training', 'algorithm', key))}: training.algorithm.{key} {wrong}"
    if wrong := _optimizer_problem(run.training.optimizer):
        yield f"{tree.place(('training', 'optimizer'))}: training.optimizer {wrong}"
    yield from (f"{tree.place(path)}: {wrong}" for path, wrong in backends.problems(run))
    hosts = run.pools_of("environment").values()
    remote = all(pool.urls for pool in hosts) and not (warmup and warmup.per_task) and only_task is None
    for index, task in enumerate(run.tasks):
        if only_task in (None, task.name):
            for key, wrong in _missing_for_task(task, remote):
                yield f"{tree.place(('tasks', index, key))}: tasks.{task.name}.{key} {wrong}"


def _optimizer_problem(name: str) -> str | None:
    if name == TrainingConfig.model_fields["optimizer"].default:
        return None  # optimizers are torch's, whose import takes seconds
    from rollart.training.optimizers import OPTIMIZERS

    return OPTIMIZERS.problem(name)


def _impossible_layout(run: RunFile) -> str | None:
    """Why the trainer's ranks cannot divide the model so. A model that is not here is not checked."""
    (pool,) = run.pools_of("train").values()
    try:
        layout = run.training.parallel.layout(pool.count)
    except RollartError as error:
        return str(error)
    if run.model.path and not (run.model.path / "config.json").is_file():
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


def _missing_target(task: TaskConfig, key: str, target: str) -> str | None:
    if task.family and key != "reward":
        family = families.installed(task.family)
        return import_check.problem(target, family.packages) if family else None
    wrong = import_check.problem(target)
    name = families.family_of(target)
    if wrong and "needs the package" in wrong and name and key != "reward":
        return f"needs packages that are not installed here; give the task `family: {name}`"
    return wrong
