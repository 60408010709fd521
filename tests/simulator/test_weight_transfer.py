import asyncio

import pytest

from rollart.simulator import clock
from rollart.simulator.weight_transfer import WeightTransfer

SIZE, LINK = 10_000_000_000, 25e9


def arrival(weights: WeightTransfer) -> float:
    async def fetch() -> float:
        weights.publish(1)
        loaded = await weights.fetch(1)
        return asyncio.get_running_loop().time() + loaded.exposed_s

    return clock.run(fetch())


def test_engines_pull_during_the_push_and_stand_still_only_for_the_rest() -> None:
    weights = WeightTransfer(SIZE, "store", LINK, LINK)
    assert arrival(weights) == pytest.approx(weights.push_s + weights.exposed_s)
    assert weights.exposed_s < weights.pull_s < weights.push_s
    assert weights.free_at == 0.0


@pytest.mark.parametrize(
    "weights", [WeightTransfer(SIZE, "store", LINK, LINK, False), WeightTransfer(SIZE, "collective", LINK, LINK)]
)
def test_without_overlap_trainer_and_engines_wait_for_the_whole_transfer(weights: WeightTransfer) -> None:
    assert arrival(weights) == pytest.approx(weights.push_s + weights.pull_s)
    assert weights.free_at == pytest.approx(weights.push_s + weights.pull_s)
    assert weights.hidden_s == 0.0


def test_a_trainer_that_installs_first_waits_for_the_engines_and_no_other_does() -> None:
    weights = WeightTransfer(SIZE, "store", LINK, LINK, install_first=True)
    assert weights.free_at == 0.0 and weights.exposed_s > 0
    assert arrival(weights) == pytest.approx(weights.free_at) == pytest.approx(weights.push_s + weights.exposed_s)
