import gc

import pytest

from rollart.core import gc_tuning


def test_collection_is_enabled_again_even_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(RuntimeError), gc_tuning.disabled():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()
