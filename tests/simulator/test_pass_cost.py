import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.config.training import MODELS
from rollart.hardware.devices import CATALOGUE
from rollart.hardware.roofline import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY, ModelShape, Roofline, decode
from rollart.simulator.constants import Constants
from rollart.simulator.pass_cost import PassCost, seconds_of, steps_in

QWEN = ModelShape.of(MODELS["qwen3-8b"])


@given(st.integers(1, 500), st.floats(1e-4, 1.0), st.floats(0, 1e-6), st.integers(1, 256), st.floats(0, 1e6))
def test_the_closed_form_is_the_sum_of_single_passes(
    steps: int, fixed: float, slope: float, batch: int, context: float
) -> None:
    one_by_one = sum(fixed + slope * (context + batch * step) for step in range(steps))
    assert seconds_of(steps, fixed, slope, batch, context) == pytest.approx(one_by_one)


@given(st.floats(1, 1e5), st.floats(1e-4, 1.0), st.floats(0, 1e-6), st.integers(1, 256), st.floats(300, 1e6))
def test_steps_in_is_the_inverse_of_seconds_of(
    steps: float, fixed: float, slope: float, batch: int, context: float
) -> None:
    seconds = seconds_of(steps, fixed, slope, batch, context)
    assert steps_in(seconds, fixed, slope, batch, context) == pytest.approx(steps, rel=1e-4)


def test_a_decode_pass_costs_its_roofline_and_the_overhead() -> None:
    roofline = Roofline(CATALOGUE["H20"], QWEN)
    constants = Constants(compute_efficiency=COMPUTE_EFFICIENCY, memory_efficiency=MEMORY_EFFICIENCY)
    fixed, slope = PassCost(roofline, constants=constants).decode(16, 50_000)
    host = Constants().pass_s + 16 * Constants().sequence_s
    assert fixed + slope * 50_000 == pytest.approx(roofline.seconds(decode(16, 50_000)) + host)


def test_prefill_is_compute_bound_and_decode_is_bandwidth_bound() -> None:
    h800, h20 = (PassCost(Roofline(CATALOGUE[name], QWEN)) for name in ("H800", "H20"))
    prefill = [cost.mixed(4096, 4096 * 2048, 4096, 2.0, 0, 0.0) for cost in (h800, h20)]
    step = [sum((fixed, slope * 32_000)) for fixed, slope in (cost.decode(8, 32_000) for cost in (h800, h20))]
    assert prefill[1] > 5 * prefill[0]
    assert step[1] < step[0]


def test_more_devices_make_an_engine_faster_but_not_in_proportion() -> None:
    one, four = (PassCost(Roofline(CATALOGUE["H800"], QWEN, devices=n)).decode(32, 100_000)[0] for n in (1, 4))
    assert one / 4 < four < one


def test_a_mixture_of_experts_reads_only_what_it_touches() -> None:
    cost = PassCost(Roofline(CATALOGUE["H800"], ModelShape.of(MODELS["qwen3-30b-a3b"])))
    assert cost.decode(1, 0.0)[0] < 0.5 * cost.decode(64, 0.0)[0]
