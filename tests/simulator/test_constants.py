from hypothesis import given
from hypothesis import strategies as st

from rollart.simulator.constants import UNCERTAINTY, Constants


@given(seed=st.integers(0, 1 << 30))
def test_drawn_constants_are_valid_and_the_same_for_the_same_seed(seed: int) -> None:
    drawn = Constants().drawn(seed)

    assert drawn == Constants().drawn(seed)
    assert Constants.model_validate(drawn.model_dump()) == drawn
    changed = {name for name, value in drawn.model_dump().items() if value != getattr(Constants(), name)}
    assert changed <= set(UNCERTAINTY) and len(changed) > 1
