"""The import closure of a module: the files to copy, and the packages to install.

Found by reading source files and importing nothing. A module is copied as a file if it is not installed (it is the
user's own) or if it is part of rollart, of which only the needed files are copied; all others are requirements.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from rollart.config.import_check import find
from rollart.core.errors import RollartError

OURS = "rollart"


@dataclass(slots=True)
class Closure:
    """`files` by their target, relative to the root; `packages` by their import names."""

    files: dict[Path, Path] = field(default_factory=dict)
    packages: set[str] = field(default_factory=set)

    def requirements(self) -> list[str]:
        """Lines for pip, with the versions installed here."""
        names = packages_distributions()
        return sorted(_pinned(names.get(package, [package])[0]) for package in self.packages)


def closure(module: str, *more: str) -> Closure:
    """Raises RollartError for a module that cannot be found."""
    found = Closure()
    todo, done = [module, *more], set[str]()
    while todo:
        name = todo.pop()
        top = name.partition(".")[0]
        if name in done or top in sys.stdlib_module_names:
            continue
        done.add(name)
        if not _is_copied(top):
            found.packages.add(top)
            continue
        if "." in name:
            todo.append(name.rpartition(".")[0])
        path = _source(name)
        if path is not None:
            found.files[_target(name, path)] = path
            if name != OURS:  # its __init__ imports lazily, and a reward needs none of that
                todo += _imports(path, name)
    return found


def _is_copied(top: str) -> bool:
    spec = find(top)
    if spec is None:
        raise RollartError(f"module {top!r}, which the reward needs, cannot be found")
    origin = spec.origin or next(iter(spec.submodule_search_locations or []), "")
    return top == OURS or not {"site-packages", "dist-packages"} & set(Path(origin).parts)


def _source(name: str) -> Path | None:
    """The module's file; None for a namespace package."""
    spec = find(name)
    if spec is not None and spec.origin is None and spec.submodule_search_locations:
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise RollartError(f"module {name!r}, which the reward needs, is not a Python file, so it cannot be packaged")
    return Path(spec.origin)


def _target(name: str, path: Path) -> Path:
    parts = name.split(".")
    return Path(*parts, "__init__.py") if path.name == "__init__.py" else Path(*parts[:-1], f"{parts[-1]}.py")


def _imports(path: Path, name: str) -> Iterator[str]:
    """Modules that a file imports, anywhere in it; those in a `try` count only if they are installed, those under
    `if TYPE_CHECKING` never."""
    tree = _RunTime().visit(ast.parse(path.read_bytes()))
    optional = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        for module in _imported(node, package):
            if id(node) not in optional or find(module.partition(".")[0]):
                yield module


class _RunTime(ast.NodeTransformer):
    """Removes what only type checkers read."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            return node.orelse
        return self.generic_visit(node)


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        yield module
        for alias in node.names:  # `from package import module`
            inner = f"{module}.{alias.name}"
            if module.partition(".")[0] not in sys.stdlib_module_names and find(inner):
                yield inner


def _pinned(distribution: str) -> str:
    try:
        return f"{distribution}=={version(distribution)}"
    except PackageNotFoundError:
        return distribution
