from collections.abc import Iterator

import pytest
from torch import distributed


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """A single rank in bfloat16 makes a group of one."""
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()
