"""Pydantic's errors as sentences that name the line and the key, one per mistake."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from rollart.config.base import Section
from rollart.config.yaml_tree import KeyPath, Tree, did_you_mean, dotted

# Old and new names of keys. `*` stands for one step of the path (an index or a name the user chose), `**` for several.
RENAMED = {
    "environments.slots": "environments.processes",
    "environments.quarantine.least": "environments.quarantine.min_count",
    "tasks.*.agent.see": "tasks.*.agent.mounts",
    "tasks.*.agent.calls": "tasks.*.agent.max_calls",
    "tasks.*.agent.parallel": "tasks.*.agent.max_parallel",
    "routing.hand_over": "routing.disaggregate",
    "training.algorithm.solved": "training.algorithm.solved_advantage",
    "training.algorithm.evidence": "training.algorithm.evidence_power",
    "training.algorithm.importance_cap": "training.algorithm.correction.cap",
    "training.lr_warm_up": "training.lr_warmup",
    "model.warm_up": "model.warmup",
    "simulate.warm_up": "simulate.warmup",
    "simulate.ends": "simulate.finite",
    "simulate.weights.way": "simulate.weights.method",
    "simulate.**.least": "simulate.**.min",
    "simulate.**.most": "simulate.**.max",
}


def renamed(key: str) -> str | None:
    """The new dotted name of a key, if it was renamed."""
    for old, new in RENAMED.items():
        pattern = re.escape(old).replace(r"\*\*", "(.+)").replace(r"\*", "([^.]+)")
        if match := re.fullmatch(pattern, key):
            return new.replace("**", "{}").replace("*", "{}").format(*match.groups())
    return None


@dataclass(frozen=True, slots=True)
class _Mistake:
    """`path` is the key in the file; pydantic's `loc` also has the members of unions that it tried."""

    path: KeyPath
    error: ErrorDetails

    @property
    def is_wrong_type(self) -> bool:
        """Another member of a union may accept the value."""
        return self.error["type"].endswith(("_type", "_error")) and self.error["type"] != "value_error"


def sentences(tree: Tree, kind: type[BaseModel], errors: list[ErrorDetails]) -> list[str]:
    mistakes = [_Mistake(_in_file(tree, error), error) for error in errors]
    messages = []
    for path, group in groupby(_causes(kind, mistakes), key=lambda mistake: mistake.path):
        several = list(group)
        if len(several) > 1 and all(mistake.is_wrong_type for mistake in several):
            must = " or ".join(dict.fromkeys(_must(mistake.error).removeprefix("must be ") for mistake in several))
            what = f"{dotted(path, tree.value)} must be {must}, not {_shown(several[0].error['input'])}"
            messages.append(f"{tree.place(path)}: {what}")
        else:
            messages += [_sentence(tree, kind, mistake) for mistake in several]
    return messages


def _in_file(tree: Tree, error: ErrorDetails) -> KeyPath:
    path: list[str | int] = []
    value = tree.value
    for step in error["loc"]:
        known = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
        if step in known:
            value = known[step]
        elif error["type"] != "missing" or step != error["loc"][-1]:
            continue
        path.append(step)
    return tuple(path)


def _causes(kind: type[BaseModel], mistakes: list[_Mistake]) -> Iterator[_Mistake]:
    """Leaves out missing keys that were only misspelt, and type errors of a union if a member has mistakes inside."""
    unknown = [mistake.path for mistake in mistakes if mistake.error["type"] == "extra_forbidden"]
    for mistake in mistakes:
        path = mistake.path
        misspelt = any(path[:-1] == other[:-1] and f" {path[-1]!r}?" in _nearest(kind, other) for other in unknown)
        deeper = any(len(other.path) > len(path) and other.path[: len(path)] == path for other in mistakes)
        if not (mistake.error["type"] == "missing" and misspelt) and not (mistake.is_wrong_type and deeper):
            yield mistake


def _sentence(tree: Tree, kind: type[BaseModel], mistake: _Mistake) -> str:
    error, path = mistake.error, mistake.path
    cause = error.get("ctx", {}).get("error")
    path += getattr(cause, "path", ())
    name, wrong, value = dotted(path, tree.value), error["type"], error["input"]
    if wrong == "extra_forbidden" and (now := renamed(name)):
        what = f"{name} was renamed; write {now}"
    elif wrong == "extra_forbidden":
        what = f"unknown key {path[-1]!r} in {_section(tree, path[:-1])}{_nearest(kind, path)}"
    elif wrong == "missing":
        what = f"key {path[-1]!r} is missing in {_section(tree, path[:-1])}"
    elif wrong == "value_error":
        section = dotted(mistake.path, tree.value)
        what = f"{section}: {cause}" if section else str(cause)
    elif wrong == "union_tag_invalid":
        known, given = error["ctx"]["expected_tags"].replace("'", "").split(", "), str(error["ctx"]["tag"])
        what = f"{name} must be one of {', '.join(known)}, not {_shown(given)}{did_you_mean(given, known)}"
    elif wrong == "string_pattern_mismatch":
        what = f"{name} must {_shape(error)}, not {value!r}"
    else:
        what = f"{name} {_must(error)}, not {_shown(value)}{_hint(wrong, value, error)}"
    return f"{tree.place(path)}: {' '.join(what.split())}"


def _section(tree: Tree, path: KeyPath) -> str:
    return dotted(path, tree.value) or "the run file"


def _must(error: ErrorDetails) -> str:
    limits = error.get("ctx", {})
    special = {
        "model_type": "must be a section with keys of its own",
        "int_from_float": "must be a whole number",
        "int_type": "must be a whole number",
        "float_type": "must be a number",
        "string_type": "must be text",
        "list_type": "must be a list",
        "tuple_type": "must be a list",
        "too_short": f"must have at least {limits.get('min_length')} items",
        "too_long": f"must have at most {limits.get('max_length')} items",
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


def _nearest(kind: type[BaseModel], path: KeyPath) -> str:
    """A hint: the nearest key of the same section, or another section that has this key."""
    sections = list(_sections(kind, ()))
    inside = [section for above, section in sections if _matches(above, path[:-1])]  # several, if it is a union
    known = list(dict.fromkeys(name for section in inside for name in section.model_fields))
    owners = [above for above, section in sections if path[-1] in section.model_fields]
    if close := did_you_mean(str(path[-1]), known):
        return close
    if owners:
        inner = next((above for above in owners if above[: len(path) - 1] == path[:-1]), owners[0])
        return f"; it belongs in {dotted(inner) or 'the top level'}"
    return f"; valid keys are {', '.join(known)}"


def _matches(above: KeyPath, path: KeyPath) -> bool:
    """Whether `path` is an instance of `above`, in which <task> is any item of the list or mapping `tasks`."""
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
