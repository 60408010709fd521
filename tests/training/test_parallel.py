"""Every way to divide a model gives the gradients of one process."""

from pathlib import Path

import pytest

from benchmarks.parallel import CASES, Case, make_models, run
from rollart.core.errors import RollartError
from rollart.hardware.layout import Layout, misfits

MODEL = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[1::2], ids=str)  # the benchmark runs all; these have every kind
def test_a_layout_has_the_gradients_of_one_process_publishes_all_once_and_reshards(models: Path, case: Case) -> None:
    row = run(case, models)
    assert row["gradient_error"] < 1e-5
    assert row["norm_error"] < 1e-5
    assert row["export_exact"] and row["reshard_exact"]


def test_the_ranks_that_are_left_are_data_parallel() -> None:
    assert Layout.over(8, context=2, tensor=2, expert=4) == Layout(data=2, context=2, tensor=2, expert=4)
    assert [Layout.over(8, tensor=2, context=2).data_index(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("ranks", "split", "message"),
    [
        (3, {"tensor": 2}, "3 ranks cannot be divided into context 1 x tensor 2; give the trainer a multiple of 2"),
        (2, {"context": 4}, "a multiple of 4 ranks"),
        (4, {"tensor": 2, "expert": 3}, "expert 3 must divide the number of ranks"),
        (4, {"tensor": 4, "expert": 2}, "a multiple of tensor"),
    ],
)
def test_ranks_that_cannot_be_divided_are_refused(ranks: int, split: dict[str, int], message: str) -> None:
    with pytest.raises(RollartError, match=message):
        Layout.over(ranks, **split)


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (Layout(tensor=2, expert=2), None),
        (Layout(tensor=2), "tensor 2 needs an `expert` too, a multiple of it: experts are not cut, but spread"),
        (Layout(context=8), None),
        (Layout(tensor=4, expert=4), "tensor 4 must divide the model's 8 attention heads and its 2 KV heads"),
        (Layout(context=3), "context 3 must divide the model's 8 attention heads"),
        (Layout(context=8, tensor=2, expert=2), "context 8 must divide the model's 8 attention heads / tensor 2"),
        (Layout(data=16, expert=16), "expert 16 must divide the model's 8 experts"),
    ],
)
def test_a_layout_that_a_model_does_not_allow_is_named(layout: Layout, problem: str | None) -> None:
    assert list(misfits(layout, MODEL)) == ([problem] if problem else [])


def test_experts_are_needed_to_spread_them() -> None:
    dense = {key: value for key, value in MODEL.items() if key != "num_experts"}
    assert list(misfits(Layout(data=2, expert=2), dense)) == [
        "expert 2 needs a mixture of experts, but the model has none"
    ]
    assert list(misfits(Layout(tensor=2), dense)) == []
