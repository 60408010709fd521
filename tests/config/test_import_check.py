import sys
from pathlib import Path

import pytest

from rollart.config import import_check

SOURCE = """
import json
from os import path as where
LIMIT: int = 3
A, (B, C) = 1, (2, 3)
if LIMIT:
    def inside(): ...
try:
    import not_there_optional
except ImportError:
    not_there_optional = None
class Lazy:
    def reset(self):
        import not_there_at_all
class Careful:
    def reset(self):
        try:
            import not_there_either
        except ImportError:
            pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "importable_sample"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize("name", ["LIMIT", "A", "C", "inside", "Careful", "where", "json", "not_there_optional"])
def test_names_that_the_source_defines_are_found(module: str, name: str) -> None:
    assert import_check.problem(f"{module}:{name}") is None


def test_a_name_that_is_not_there_comes_with_the_nearest(module: str) -> None:
    assert "did you mean 'Careful'?" in (import_check.problem(f"{module}:Carefull") or "")


def test_a_package_that_only_one_class_needs_is_asked_of_that_class(module: str) -> None:
    assert "needs the package 'not_there_at_all'" in (import_check.problem(f"{module}:Lazy") or "")


def test_checking_imports_nothing(module: str) -> None:
    before = set(sys.modules)
    import_check.problem(f"{module}:Lazy")
    assert import_check.problem("xmlrpc.server:SimpleXMLRPCServer") is None
    assert module not in sys.modules
    assert "xmlrpc.server" not in set(sys.modules) - before


def test_packages_of_extras_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_check, "_extras", lambda: {"no_such_games": "games"})
    assert "pip install 'rollart[games]'" in (import_check.problem("no_such_games.lake:Lake") or "")


def test_the_extras_are_read_from_our_own_metadata() -> None:
    assert import_check._extras()["gymnasium"] == "games"
    assert import_check._extras()["reasoning_gym"] == "games"


def test_source_that_does_not_parse_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "importable_broken.py").write_text("def (")
    monkeypatch.syspath_prepend(tmp_path)
    assert "not valid Python" in (import_check.problem("importable_broken:x") or "")


def test_builtin_and_compiled_modules_are_trusted() -> None:
    assert import_check.problem("sys:exit") is None
    assert import_check.problem("math:sqrt") is None
