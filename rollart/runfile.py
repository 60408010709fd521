"""Loads run files. Everything that is wrong with one is told in sentences that name the file, the line and the key."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from rollart import importable, mistakes
from rollart.config import RunFile, Task
from rollart.engines.vllm import problems as vllm
from rollart.envs import families
from rollart.errors import ConfigError
from rollart.yamltree import Dumper, Tree, parse

_MOST = 10
R = TypeVar("R", bound=RunFile)


def load(
    path: Path, overrides: Sequence[str] = (), *, need_model: bool = True, only_task: str | None = None
) -> RunFile:
    """The run file with `overrides` (`a.b.c=value`) applied. Raises ConfigError with one sentence per problem; what
    tasks need is looked for in all of them, or in `only_task`."""
    tree = read(path, overrides)
    run = validated(tree, RunFile)
    problems = list(_unusable(run, tree, need_model, only_task))
    if problems:
        raise ConfigError("\n".join(problems))
    return run


def read(path: Path, overrides: Sequence[str] = ()) -> Tree:
    """The file as it is written, with `overrides`; nothing is checked but its form."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the run file {path}: {reason}") from None
    tree = parse(text, str(path))
    if not isinstance(tree.value, dict):
        raise ConfigError(f"{path}: a run file is a list of `key: value` lines; `rollart schema` shows the keys")
    for override in overrides:
        tree.set(override)
    return tree


def dump(run: RunFile) -> str:
    """The resolved run file as YAML that `load` reads back unchanged."""
    return yaml.dump(run.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def schema() -> dict[str, Any]:
    """JSON schema, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunFile.model_json_schema()}


def validated(tree: Tree, kind: type[R]) -> R:
    # As JSON, strict mode refuses "3" for 3 but still takes text for a path and a list for a pair.
    try:
        return kind.model_validate_json(json.dumps(tree.value), strict=True)
    except ValidationError as error:
        problems = mistakes.sentences(tree, kind, error.errors(include_url=False))
    more = [f"and {len(problems) - _MOST} more problems"] if len(problems) > _MOST else []
    raise ConfigError("\n".join(problems[:_MOST] + more))


def _unusable(run: RunFile, tree: Tree, need_model: bool, only_task: str | None) -> Iterator[str]:
    """What the values themselves cannot show: files, modules and packages that are not there."""
    if need_model and run.model.path and not (run.model.path / "config.json").is_file():
        yield f"{tree.place(('model', 'path'))}: model.path {str(run.model.path)!r} is not a Hugging Face model folder"
    if run.measured and not (run.measured / "events.jsonl").is_file():
        where = f"{tree.place(('measured',))}: measured {str(run.measured)!r}"
        yield f"{where} is not the folder of a run: it has no events.jsonl"
    yield from (f"{tree.place(path)}: {wrong}" for path, wrong in vllm.problems(run))
    hosts = run.pools_of("environment").values()
    elsewhere = all(pool.urls for pool in hosts) and run.model.warm_up is None and only_task is None
    for index, task in enumerate(run.tasks):
        if only_task in (None, task.name):
            for key, wrong in _unusable_keys(task, elsewhere):
                yield f"{tree.place(('tasks', index, key))}: tasks.{task.name}.{key} {wrong}"


def _unusable_keys(task: Task, elsewhere: bool) -> Iterator[tuple[str, str]]:
    """`elsewhere`: no environment runs here, so hosts that we cannot look into must have what it needs."""
    targets: dict[str, str | None] = {} if elsewhere else {"env": task.env, "player": task.player}
    if task.agent is not None:
        targets["agent"] = task.agent.function
        for folder in (task.agent.files, *task.agent.see):
            if folder and not folder.is_dir():
                yield "agent", f"needs the folder {str(folder)!r}, which is not there"
    if task.reward.invoker in ("pool", "ray"):  # elsewhere it may need what is not installed here
        targets["reward"] = task.reward.function
    for key, target in targets.items():
        if target and (wrong := _unusable_target(task, key, target)):
            yield key, wrong
    if task.family and not elsewhere and (wrong := families.problem(task.family)):
        yield "family", wrong


def _unusable_target(task: Task, key: str, target: str) -> str | None:
    if task.family and key != "reward":
        family = families.installed(task.family)
        return importable.problem(target, family.packages) if family else None
    wrong = importable.problem(target)
    name = families.family_of(target)
    if wrong and "needs the package" in wrong and name and key != "reward":
        return f"needs packages that are not installed here; give the task `family: {name}`"
    return wrong
