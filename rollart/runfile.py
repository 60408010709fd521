"""Loads run files. Everything that is wrong with one is told in sentences that name the file, the line and the key."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollart import importable
from rollart.config import RunFile, Section, Task
from rollart.engines.vllm import problems as vllm
from rollart.envs import families
from rollart.errors import ConfigError
from rollart.yamltree import Dumper, KeyPath, Tree, did_you_mean, dotted, parse

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
        problems = [_sentence(tree, each) for each in _causes(error.errors(include_url=False))]
    more = [f"and {len(problems) - _MOST} more problems"] if len(problems) > _MOST else []
    raise ConfigError("\n".join(problems[:_MOST] + more))


def _causes(errors: list[ErrorDetails]) -> Iterator[ErrorDetails]:
    """Without the missing keys that are there under a misspelt name: one mistake is one sentence."""
    unknown = [tuple(error["loc"]) for error in errors if error["type"] == "extra_forbidden"]
    for error in errors:
        path = tuple(error["loc"])
        misspelt = any(path[:-1] == other[:-1] and f" {path[-1]!r}?" in _nearest(other) for other in unknown)
        if error["type"] != "missing" or not misspelt:
            yield error


def _sentence(tree: Tree, error: ErrorDetails) -> str:
    path: KeyPath = tuple(error["loc"])
    cause = error.get("ctx", {}).get("error")
    path += getattr(cause, "path", ())
    name, kind, value = dotted(path, tree.value), error["type"], error["input"]
    if kind == "extra_forbidden":
        what = f"unknown key {path[-1]!r} in {_section(tree, path[:-1])}{_nearest(path)}"
    elif kind == "missing":
        what = f"key {path[-1]!r} is missing in {_section(tree, path[:-1])}"
    elif kind == "value_error":
        section = dotted(tuple(error["loc"]), tree.value)
        what = f"{section}: {cause}" if section else str(cause)
    elif kind == "string_pattern_mismatch":
        what = f"{name} must {_shape(error)}, not {value!r}"
    else:
        what = f"{name} {_must(error)}, not {_shown(value)}{_hint(kind, value, error)}"
    return f"{tree.place(path)}: {' '.join(what.split())}"


def _section(tree: Tree, path: KeyPath) -> str:
    return dotted(path, tree.value) or "the run file"


def _must(error: ErrorDetails) -> str:
    special = {
        "model_type": "must be a section with keys of its own",
        "int_from_float": "must be a whole number",
        "int_type": "must be a whole number",
        "float_type": "must be a number",
        "string_type": "must be text",
        "list_type": "must be a list",
        "path_type": "must be a path",
    }
    return special.get(error["type"]) or error["msg"].replace("Input should", "must").replace("Value should", "must")


def _shown(value: Any) -> str:
    text = "empty" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _hint(kind: str, value: Any, error: ErrorDetails) -> str:
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "; put it in quotes"
    if kind == "bool_type" and str(value).lower() in ("yes", "no", "on", "off", "y", "n"):
        return "; write true or false"
    if kind == "model_type" and value is None:
        return "; remove it or give it keys"
    if kind == "literal_error" and isinstance(value, str):
        return did_you_mean(value, error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", "))
    return ""


def _shape(error: ErrorDetails) -> str:
    pattern = error["ctx"]["pattern"]
    if ":" in pattern:
        return "look like package.module:Name"
    return "be letters, digits, - and _ only, and begin with a letter" if "A-Za-z]" in pattern else f"match {pattern}"


def _nearest(path: KeyPath) -> str:
    """The key that was probably meant: in the same section, or in the one section that has such a key."""
    sections = dict(_sections(RunFile, ()))
    inside = next((section for above, section in sections.items() if _leads(above, path[:-1])), None)
    known = list(inside.model_fields) if inside else []
    elsewhere = [dotted(above) for above, section in sections.items() if path[-1] in section.model_fields]
    if close := did_you_mean(str(path[-1]), known):
        return close
    if elsewhere:
        return f"; it belongs in {elsewhere[0] or 'the top level'}"
    return f"; valid keys are {', '.join(known)}"


def _leads(above: KeyPath, path: KeyPath) -> bool:
    """Whether a path is one of those that `above` stands for: <task> is any item of the list or mapping `tasks`."""
    return len(above) == len(path) and all(
        str(step).startswith("<") or step == other for step, other in zip(above, path, strict=True)
    )


def _sections(model: type[BaseModel], path: KeyPath) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                several = getattr(field.annotation, "__origin__", None) in (list, dict)
                yield from _sections(kind, (*path, name, *((f"<{name.removesuffix('s')}>",) if several else ())))


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
