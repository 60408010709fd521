import pytest

from rollart.config.yaml_tree import dotted, parse
from rollart.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("~", None),
        ("-.inf", float("-inf")),
        ("2024-01-01", "2024-01-01"),
        ("'3'", "3"),
        ("!!str 3", "3"),
        ("", None),
    ],
)
def test_scalars_mean_what_they_look_like(text: str, value: object) -> None:
    assert parse(text, "x").value == value
    assert type(parse(text, "x").value) is type(value)


def test_every_key_knows_its_line() -> None:
    tree = parse("a: 1\nb:\n  - c: 2\n    d: 3\n", "x.yaml")
    assert tree.place(("b", 0, "d")) == "x.yaml:4"
    assert tree.place(("b", 0, "nothing")) == "x.yaml:3"
    assert tree.place(("nothing",)) == "x.yaml:1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "x:2: key 'a' is written twice"),
        ("a: &a [*a]", "contains itself"),
        ("? [1]\n: 2", "a key must be plain text"),
        ("!!int x", "cannot be read"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        ("[" * 5000, "nested too deeply"),
        ("9" * 5000, "cannot be read"),
    ],
)
def test_what_is_not_plain_data_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="x") as caught:
        parse(text, "x")
    assert message in str(caught.value)


def test_aliases_cannot_blow_up() -> None:
    text = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    for level in range(1, 9):
        text += f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n"
    with pytest.raises(ConfigError, match="too large"):
        parse(text, "x")


def test_a_path_calls_items_by_their_name() -> None:
    assert dotted(("tasks", 0, "env"), {"tasks": [{"name": "lake"}]}) == "tasks.lake.env"
    assert dotted(("tasks", 3, "env"), {"tasks": [{"name": "lake"}]}) == "tasks.3.env"
