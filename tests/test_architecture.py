"""The package stands on floors, every concept has one name, and nothing grows too large to read."""

import pytest

from benchmarks import house

TREES = house.modules()


def test_no_room_imports_a_room_above_it() -> None:
    assert house.upward_imports(TREES) == []


def test_no_rooms_import_each_other_in_a_cycle() -> None:
    assert house.room_cycles(TREES) == []


def test_nothing_is_loose_at_the_root_and_every_room_has_a_floor() -> None:
    assert house.loose_modules(TREES) == []


def test_no_public_class_name_is_defined_twice() -> None:
    assert house.duplicate_names(TREES) == []


def test_no_file_is_longer_than_400_lines() -> None:
    assert {name: lines for name, lines in house.files().items() if lines > 400} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    assert {name: lines for name, lines in house.functions(TREES).items() if lines > 60} == {}


@pytest.mark.parametrize(
    ("importer", "imported", "problem"),
    [
        ("rollart.core.types", "rollart.app.cli", house.upward_imports),
        ("rollart.engines.client", "rollart.gateway.app", house.room_cycles),
    ],
)
def test_an_edge_that_breaks_a_rule_is_named(importer: str, imported: str, problem: object) -> None:
    """`gateway` imports `engines` today, so the way back would be a cycle."""
    broken = dict(TREES)
    broken[importer] = house.ast.parse(f"import {imported}")
    assert callable(problem)
    assert any(f"{importer} imports {imported}" in line or "engines, gateway" in line for line in problem(broken))
