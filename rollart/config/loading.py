"""Loads run files. Every problem is reported in a sentence that names the file, the line and the key."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from rollart.config import RunFile, Section, error_messages
from rollart.config.task import by_function, dataset_source
from rollart.config.training import model_source
from rollart.config.yaml_tree import Dumper, Tree, parse
from rollart.core.errors import ConfigError

_MAX_PROBLEMS = 10
S = TypeVar("S", bound=Section)
# So that `--set model.enable_thinking=false` works where the file has `model: Qwen/Qwen3-8B`.
SHORT_FORMS = {"model": model_source, "reward": by_function, "agent": by_function, "dataset": dataset_source}


def load(path: Path, overrides: Sequence[str] = ()) -> RunFile:
    """The run file with `overrides` (`a.b.c=value`) applied. Raises ConfigError with one sentence per problem.
    `app.preflight` checks that what it names exists on this machine."""
    return validated(read(path, overrides), RunFile)


def read(path: Path, overrides: Sequence[str] = ()) -> Tree:
    """The file with `overrides`, not validated. Raises ConfigError if it is not a YAML mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the run file {path}: {reason}") from None
    tree = parse(text, str(path))
    if not isinstance(tree.value, dict):
        raise ConfigError(f"{path}: a run file is a list of `key: value` lines; `rollart schema` shows the keys")
    tree.short_forms = SHORT_FORMS
    for override in overrides:
        tree.set(override)
    return tree


def dump(run: Section) -> str:
    """The resolved run file as YAML; `load` reads it back unchanged."""
    return yaml.dump(run.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def schema() -> dict[str, Any]:
    """JSON schema, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunFile.model_json_schema()}


def validated(tree: Tree, kind: type[S]) -> S:
    # From JSON, strict mode rejects "3" for 3 but accepts text for a path and a list for a pair.
    try:
        return kind.model_validate_json(json.dumps(tree.value), strict=True)
    except ValidationError as error:
        problems = error_messages.sentences(tree, kind, error.errors(include_url=False))
    more = [f"and {len(problems) - _MAX_PROBLEMS} more problems"] if len(problems) > _MAX_PROBLEMS else []
    raise ConfigError("\n".join(problems[:_MAX_PROBLEMS] + more))
