"""A scratch folder for benchmarks that start processes."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder(name: str) -> Iterator[Path]:
    """Removed at the end, but kept if the benchmark fails: errors name the logs in it."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    try:
        yield folder
    except BaseException:
        print(f"{name} failed; its logs are in {folder}", flush=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
