"""The documentation site builds with warnings as errors, and its generated pages are complete."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from rollart.config import RunFile

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.mark.slow
def test_the_reference_has_every_top_level_key_of_a_run_file(site: Path) -> None:
    page = (site / "reference" / "run-file" / "index.html").read_text()
    assert [key for key in RunFile.model_fields if f"<code>{key}</code>" not in page] == []


@pytest.mark.slow
def test_the_reference_has_every_command(site: Path) -> None:
    page = (site / "reference" / "commands" / "index.html").read_text()
    assert all(f"rollart {name}" in page for name in ("train", "check", "show", "simulate", "envs add"))


@pytest.mark.slow
def test_the_site_asks_no_other_host_for_anything(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert "googleapis" not in page and "cdn." not in page


def test_every_key_of_the_run_file_has_a_meaning() -> None:
    sections: list[type[BaseModel]] = [RunFile]
    missing = []
    for section in sections:
        for name, field in section.model_fields.items():
            inner = [found for found in sections_of(field.annotation) if found not in sections]
            sections += inner
            if not field.description and not sections_of(field.annotation):
                missing.append(f"{section.__name__}.{name}")
    assert missing == []


def sections_of(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in sections_of(part)]
