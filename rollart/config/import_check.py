"""Checks that `module:name` exists, from source files: importing may be slow or need a GPU."""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from rollart.config.yaml_tree import did_you_mean


def problem(target: str, more: Sequence[str] = ()) -> str | None:
    """What is wrong with `module:name`, as the end of a sentence, or None. `more` folders are searched too."""
    module, _, name = target.partition(":")
    top = module.partition(".")[0]
    if not find(top, more):
        return _not_installed(top) if top in _extras() else f"names module {module!r}, which cannot be found"
    spec = find(module, more)
    if spec is None:
        return f"names module {module!r}, which cannot be found"
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (SyntaxError, ValueError) as error:
        return f"names module {module!r}, which is not valid Python: {error}"
    names = _names(tree)
    if name not in names and not {"*", "__getattr__"} & names and not find(f"{module}.{name}", more):
        return f"names {name!r}, which module {module!r} does not have{did_you_mean(name, sorted(names))}"
    missing = next((package for package in _imports(tree, name) if not find(package, more)), None)
    return f"names {target!r}, which {_not_installed(missing)}" if missing else None


def _not_installed(package: str) -> str:
    extra = _extras().get(package)
    requirement = f"rollart[{extra}]" if extra else package
    return f"needs the package {package!r}, which is not installed; run: pip install '{requirement}'"


def find(module: str, more: Sequence[str] = ()) -> ModuleSpec | None:
    """The spec of a module, without importing its parents as importlib does. Also looks in the current folder."""
    if module in sys.builtin_module_names:
        return ModuleSpec(module, None)
    path: list[str] | None = [*sys.path, str(Path.cwd()), *more]
    spec: ModuleSpec | None = None
    for part in module.split("."):  # the full name would import the parent of a folder without __init__.py
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _top_level(handler.body)


def _names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for statement in _top_level(tree.body):
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update((alias.asname or alias.name).partition(".")[0] for alias in aliases)
            case ast.Assign() | ast.AnnAssign():
                targets = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
                names.update(node.id for node in targets if isinstance(node.ctx, ast.Store))
    return names


def _imports(tree: ast.Module, name: str) -> Iterator[str]:
    """Packages that the module or its member `name` imports, without optional ones (in a `try`)."""
    statements: list[ast.AST] = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    for top in tree.body:
        if getattr(top, "name", None) == name:
            optional = {id(inner) for node in ast.walk(top) if isinstance(node, ast.Try) for inner in ast.walk(node)}
            statements += [node for node in ast.walk(top) if id(node) not in optional]
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@lru_cache(maxsize=1)
def _extras() -> dict[str, str]:
    """The extra of rollart that installs each optional package, by import name."""
    try:
        lines = requires("rollart") or []
    except PackageNotFoundError:
        lines = []
    found = (re.match(r"([\w.-]+).*extra\s*==\s*['\"]([\w-]+)", line) for line in lines)
    pairs = ((match[1].replace("-", "_").lower(), match[2]) for match in found if match)
    return {package: extra for package, extra in pairs if extra != "dev"}
