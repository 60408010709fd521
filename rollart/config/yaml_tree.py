"""Strict YAML that remembers where each value was written.

Unlike YAML 1.1, only `true` and `false` are booleans (`on`, `no` and dates are text), `1e-3` is a number and a key
written twice is an error. A `Tree` is plain values and the place of each, for error messages.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import yaml

from rollart.core.errors import ConfigError

KeyPath = tuple[str | int, ...]

MAX_NODES = 100_000
_TAG = "tag:yaml.org,2002:"
_SCALARS: list[tuple[str, str, str]] = [
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own name)


class Dumper(yaml.SafeDumper):
    """Quotes text that a YAML reader could read as another type, so that `parse` reads back what was written."""

    yaml_implicit_resolvers = {key: list(rules) for key, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()}  # noqa: RUF012


for _kind, _pattern, _first in _SCALARS:
    for _class in (_Loader, Dumper):
        _class.add_implicit_resolver(
            _TAG + _kind, re.compile(rf"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first]
        )


@dataclass(slots=True)
class Tree:
    """`places` has where each key was written, for messages: `run.yaml:14` or `--set training.lr=x`. `short_forms`: by
    the name of a section, what makes keys of a text that may stand in its place."""

    value: Any
    places: dict[KeyPath, str] = field(default_factory=dict)
    short_forms: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Where `path` or its nearest parent was written."""
        while path not in self.places and path:
            path = path[:-1]
        return self.places.get(path, "run file")

    def set(self, override: str) -> None:
        """Apply one `a.b.c=value`. An item of a list is given by its index or its `name`. Raises ConfigError."""
        place = f"--set {override}"
        keys, equals, text = override.partition("=")
        if not equals or not all(keys.split(".")):
            raise ConfigError(f"{place}: write it as section.key=value")
        new = parse(text, place, lines=False)
        path, parent = self._enter(keys.split("."), place)
        parent[path[-1]] = new.value
        self.places = {old: where for old, where in self.places.items() if old[: len(path)] != path}
        self.places.update({path + below: where for below, where in new.places.items()})

    def _enter(self, keys: Sequence[str], place: str) -> tuple[KeyPath, Any]:
        """The path of `keys`, and the section or list that its last step is in; creates missing sections."""
        path: KeyPath = ()
        value = self.value
        for depth, key in enumerate(keys):
            above = ".".join(keys[:depth])
            if isinstance(value, list):
                step: str | int = _item(value, key, above, place)
            elif isinstance(value, dict):
                step = key
            else:
                raise ConfigError(f"{place}: {above} holds {value!r}, which has no keys below it")
            path = (*path, step)
            if depth < len(keys) - 1:
                if isinstance(value, dict) and value.get(key) is None:
                    value[key] = {}
                    self.places[path] = place
                if isinstance(value[step], str) and key in self.short_forms:
                    value[step] = self.short_forms[key](value[step])
                value = value[step]
        return path, value


def _item(items: list[Any], key: str, above: str, place: str) -> int:
    names = [str(item["name"]) if isinstance(item, dict) and "name" in item else "" for item in items]
    if key in names:
        return names.index(key)
    if key.isascii() and key.isdigit() and int(key) < len(items):
        return int(key)
    known = [name for name in names if name]
    hint = did_you_mean(key, known) or (f"; it has {', '.join(known)}" if known else f"; it has {len(items)} items")
    raise ConfigError(f"{place}: {above} has no item {key!r}{hint}")


def did_you_mean(word: str, known: Sequence[str]) -> str:
    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def parse(text: str, place: str, *, lines: bool = True) -> Tree:
    """Raises ConfigError. With `lines`, places are `place:line`."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(_syntax(error, place, lines)) from None
    except RecursionError:
        raise ConfigError(f"{place}: the YAML is nested too deeply") from None
    builder = _Builder(place, lines)
    value = builder.build(node, ()) if node else None
    builder.places.setdefault((), f"{place}:1" if lines else place)
    return Tree(value, builder.places)


class _Builder:
    def __init__(self, place: str, lines: bool) -> None:
        self.places: dict[KeyPath, str] = {}
        self._place, self._lines = place, lines
        self._above: list[yaml.Node] = []
        self._count = 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self._count += 1
        if any(node is outer for outer in self._above):
            raise ConfigError(f"{self._where(node)}: an alias contains itself")
        if self._count > MAX_NODES or len(self._above) > 100:
            raise ConfigError(f"{self._where(node)}: the YAML is too large or nested too deeply")
        self.places.setdefault(path, self._where(node))
        self._above.append(node)
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
            if isinstance(node, yaml.ScalarNode):
                return self._scalar(node)
        finally:
            self._above.pop()
        raise ConfigError(f"{self._where(node)}: the YAML tag {node.tag!r} is not supported; remove it")

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key_node, below in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{self._where(key_node)}: a key must be plain text")
            key = str(key_node.value)
            here = (*path, key)
            if key == "<<":
                raise ConfigError(f"{self._where(key_node)}: merge keys (`<<`) are not supported; write the keys out")
            if key in value:
                raise ConfigError(f"{self._where(key_node)}: key {dotted(here)!r} is written twice; remove one of them")
            self.places[here] = self._where(key_node)
            value[key] = self.build(below, here)
        return value

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text = str(node.value)
        try:
            match node.tag.removeprefix(_TAG):
                case "str":
                    return text
                case "null":
                    return None
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "int":
                    return int(text, 0) if re.match(r"0[xo]", text) else int(text)
                case "float":
                    return float(re.sub(r"\.(?=[inIN])", "", text))
        except (ValueError, KeyError):
            raise ConfigError(f"{self._where(node)}: {text[:40]!r} cannot be read as {node.tag}") from None
        raise ConfigError(f"{self._where(node)}: the YAML tag {node.tag!r} is not supported; remove it")

    def _where(self, node: yaml.Node) -> str:
        return f"{self._place}:{node.start_mark.line + 1}" if self._lines else self._place


def _syntax(error: Exception, place: str, lines: bool) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    what = " ".join(str(problem).split())
    return f"{place}{f':{mark.line + 1}' if mark and lines else ''}: not valid YAML: {what}"


def dotted(path: KeyPath, value: Any = None) -> str:
    """`tasks.frozen_lake.weight`: items of a list are shown by their name in `value`, else by index."""
    words = []
    for step in path:
        inside = isinstance(value, dict) or (isinstance(value, list) and isinstance(step, int) and step < len(value))
        value = (value.get(step) if isinstance(value, dict) else value[step]) if inside else None
        named = isinstance(step, int) and isinstance(value, dict) and isinstance(value.get("name"), str)
        words.append(value["name"] if named and value else str(step))
    return ".".join(words)
