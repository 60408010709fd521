import ctypes
import shutil
from pathlib import Path

import pytest

from rollart.core.native import native_library

SOURCES = "rollart.engines.torch", ("kernels.c", "products.c"), ("DIM=8", "GROUP=2")


def test_without_a_working_compiler_there_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for compiler in ("no-such-compiler", shutil.which("false") or "false"):
        monkeypatch.setenv("CC", compiler)
        assert native_library.__wrapped__(*SOURCES) is None
    monkeypatch.delenv("CC")
    assert isinstance(native_library.__wrapped__(*SOURCES), ctypes.CDLL)
    [kept] = (tmp_path / "rollart").iterdir()
    assert kept.suffix == ".so"
