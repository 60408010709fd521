import gc

import pytest

from rollart.core import gc_tuning


def test_it_is_on_again_after_work_without_cycles_even_if_that_failed() -> None:
    assert gc.isenabled()
    with pytest.raises(RuntimeError), gc_tuning.disabled():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()
