"""MkDocs hooks: pages made from the code, and links that work both here and in a checkout.

The reference of run files comes from the schema, the reference of commands from the command line itself, so neither can
be out of date. Links to source files, which the site does not contain, become plain paths.
"""

import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.text import Text

from rollart.app.cli import app
from rollart.config import RunFile
from rollart.config.robots import AnyPolicyConfig, ComparisonFile, RobotRunFile

ROOT = Path(__file__).parents[1]
RECORDED = "<!-- recorded -->"  # where the page of benchmarks shows what was recorded
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "reference/run-file.md": "\n".join(run_file()),
        "reference/commands.md": "\n".join(commands()),
        "reference/robots.md": "\n".join(robot_run_file()),
        "contributing.md": _from_root("CONTRIBUTING.md"),
        "changelog.md": _from_root("CHANGELOG.md"),
    }
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def _from_root(name: str) -> str:
    """A page of the checkout's root, whose links into docs/ become links between pages."""
    return (ROOT / name).read_text().replace("](docs/", "](")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    markdown = OUTSIDE.sub(lambda match: f"{match[1]} (`{match[2].removeprefix('../')}`)", markdown)
    return markdown.replace(RECORDED, "\n".join(recorded()))


def recorded() -> Iterator[str]:
    yield "| command | result | commit | date | seconds | load |\n|---|---|---|---|---|---|"
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        one = json.loads(path.read_text())
        flat = {key: value for key, value in one["result"].items() if len(json.dumps(value)) <= 60}
        shown = ", ".join(f"`{key}` {_number(value)}" for key, value in flat.items())
        load = " to ".join(map(str, one["load"]))
        yield f"| `{one['command']}` | {shown} | {one['commit']} | {one['date']} | {one['seconds']:.0f} | {load} |"


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else _cell(json.dumps(value).strip('"'))


def run_file() -> Iterator[str]:
    yield "# Run file\n"
    yield "Every key with its default and meaning, generated from the schema (`rollart schema` prints it for editors)."
    yield "An unknown key is an error that names the nearest known one. `--set a.b.c=value` changes one key of a run.\n"
    yield from _section(RunFile, "")


def robot_run_file() -> Iterator[str]:
    yield "# Run file of robots\n"
    yield "What `rollart robots train` reads; `policy: flow` is short for `policy: {name: flow}`.\n"
    yield from _section(RobotRunFile, "")
    for policy in get_args(AnyPolicyConfig)[1:]:
        yield from _section(policy, f"policy: {policy.model_fields['name'].default}")
    yield "\n## Comparisons\n"
    yield "`rollart robots compare` reads the same keys, and in place of `task`, `policy` and `urls`:\n"
    yield "| key | value | default | meaning |\n|---|---|---|---|"
    for name, field in ComparisonFile.model_fields.items():
        if name not in RobotRunFile.model_fields:
            yield f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {_cell(field.description or '')} |"


def _section(section: type[BaseModel], path: str) -> Iterator[str]:
    if path:
        yield f"\n## `{path}` {{#{_anchor(path)}}}\n"
        yield (section.__doc__ or "").strip() + "\n"
    yield "| key | value | default | meaning |\n|---|---|---|---|"
    nested: list[tuple[type[BaseModel], str]] = []
    for name, field in section.model_fields.items():
        inner, value = _inner(field.annotation), _type(field.annotation)
        whole = f"{path}.{name}" if path else name
        if inner is not None:
            many = {dict: f"{whole}.NAME", list: f"{whole}[]"}.get(get_origin(field.annotation) or object, whole)
            nested.append((inner, many))
            value = value.replace("section", f"[section](#{_anchor(many)})")
        yield f"| `{name}` | {value} | {_default(field)} | {_cell(field.description or '')} |"
    for inner, where in nested:
        yield from _section(inner, where)


def _anchor(path: str) -> str:
    return re.sub(r"\W+", "-", path).strip("-").lower()


def _inner(annotation: Any) -> type[BaseModel] | None:
    """The section inside an annotation, however it is wrapped."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _inner(part)) is not None), None)


def _type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0])
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(part) for part in parts if part is not type(None)))
    if origin in (list, tuple):
        return f"list of {_type(parts[0])}" if parts else "list"
    if origin is dict:
        return f"map to {_type(parts[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "Any": "section"}.get(
        getattr(annotation, "__name__", str(annotation)), getattr(annotation, "__name__", "").lower()
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, BaseModel) or value in ([], {}, ""):
        return ""
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "`rollart COMMAND --help` prints the same in the terminal.\n"
    yield from _commands(typer.main.get_command(app), "rollart")


def _commands(command: Any, name: str) -> Iterator[str]:
    inner = getattr(command, "commands", {})
    if not inner:
        takes = [_label(each) for each in command.params if not each.opts[0].startswith("-")]
        yield f"\n## `{name}`\n\n```text\n{' '.join([name, '[OPTIONS]', *takes])}\n```\n"
        yield _plain(command.help) + "\n"
        yield "| option | meaning |\n|---|---|"
        yield from (f"| `{_label(each)}` | {_cell(_plain(getattr(each, 'help', '')))} |" for each in command.params)
    for key in sorted(inner):
        yield from _commands(inner[key], f"{name} {key}")


def _label(parameter: Any) -> str:
    option = parameter.opts[0].startswith("-")
    return ", ".join(parameter.opts) if option else str(parameter.metavar or parameter.name.upper())


def _plain(text: str | None) -> str:
    """Help texts carry rich's markup; the example commands in them become code."""
    lines = Text.from_markup(text or "").plain.strip().splitlines()
    shown = [f"    {line.strip()}" if line.strip().startswith("rollart ") else line.strip() for line in lines]
    return "\n".join(shown)
