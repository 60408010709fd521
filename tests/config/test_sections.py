from collections.abc import Iterator
from typing import get_args

import pytest

from rollart.config import RunFile, Section


def sections(kind: type[Section]) -> Iterator[type[Section]]:
    yield kind
    for field in kind.model_fields.values():
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, Section):
                yield from sections(part)


@pytest.mark.parametrize("section", dict.fromkeys(sections(RunFile)), ids=lambda section: section.__name__)
def test_every_key_and_section_of_the_run_file_is_described(section: type[Section]) -> None:
    assert section.__doc__
    for name, field in section.model_fields.items():
        parts = (field.annotation, *get_args(field.annotation))
        is_section = any(isinstance(part, type) and issubclass(part, Section) for part in parts)
        assert field.description or is_section, name
