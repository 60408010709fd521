"""Families for the tests, made once per machine. Set ROLLART_TEST_ENVS=all to make those that take minutes, too."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rollart.envs import families
from rollart.envs.families import install

LONG = {"alfworld", "metaworld", "adroit"}


@pytest.fixture(scope="session")
def family() -> Callable[[str], str]:
    """Makes a family if it is not there yet, and gives its Python."""
    os.environ.setdefault("ROLLART_ENVS", str(Path.home() / ".cache" / "rollart" / "test-envs"))

    def make(name: str) -> str:
        if name in LONG and os.environ.get("ROLLART_TEST_ENVS") != "all" and not families.installed(name):
            pytest.skip(f"{name} takes minutes to install; run: make test-envs")
        return str(install.add(families.catalogue()[name], print).python)

    return make
