"""The memory model of a trainer rank: its bookkeeping. How close it is to real processes is benchmarks/memory.py's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollart.core.errors import RollartError
from rollart.hardware.layout import Layout, misfits
from rollart.hardware.layout_choice import candidates, choose, proposal
from rollart.hardware.training_memory import Decoder, TrainingSetup, training_memory

MODELS = Path(__file__).parents[2] / "examples" / "scale" / "models"
LEAN = TrainingSetup(dtype="bfloat16", recompute="full", pack_tokens=32768, flash=True)


def model(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / name / "config.json").read_text())
    return config


@pytest.mark.parametrize(("name", "billions"), [("Qwen3-8B", 8.19), ("Qwen3-32B", 32.76), ("Qwen3-235B-A22B", 235.1)])
def test_parameters_are_those_of_the_published_models(name: str, billions: float) -> None:
    assert Decoder.of(model(name)).parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_states_are_shared_by_all_ranks_whatever_the_layout() -> None:
    dense, mixture = model("Qwen3-8B"), model("Qwen3-235B-A22B")
    for config, layouts in (
        (dense, [Layout(data=8), Layout(data=2, context=4), Layout(data=2, tensor=4)]),
        (mixture, [Layout(data=8), Layout(data=8, expert=8), Layout(data=2, context=2, tensor=2, expert=4)]),
    ):
        found = [training_memory(config, replace(LEAN, layout=layout)) for layout in layouts]
        assert len({(each.parameters, each.gradients, each.optimizer) for each in found}) == 1
        assert found[0].parameters == pytest.approx(4 * Decoder.of(config).parameters / 8)
        assert found[0].optimizer == 2 * found[0].gradients


def test_each_setting_takes_less_of_what_it_is_for() -> None:
    config, plain = model("Qwen3-8B"), TrainingSetup(layout=Layout(data=8), reference=True)
    kept = [
        training_memory(config, replace(plain, recompute=what)).activations for what in ("none", "selective", "full")
    ]
    assert kept[0] > kept[1] > kept[2] > 0
    half = training_memory(config, replace(plain, dtype="bfloat16"))
    assert half.activations < 0.6 * kept[0]
    split = training_memory(config, replace(plain, layout=Layout(data=4, context=2)))
    assert split.activations == pytest.approx(kept[0] / 2, rel=0.01)
    moved = training_memory(config, replace(plain, offload=("optimizer", "activations")))
    assert moved.optimizer == moved.activations == 0
    assert moved.host == pytest.approx(kept[0] + 16 * Decoder.of(config).parameters / 8)
    states = [training_memory(config, replace(plain, optimizer=name)).optimizer for name in ("muon", "adamw_8bit")]
    whole = training_memory(config, plain).optimizer
    assert whole > states[0] > whole / 2 > states[1] > whole / 4
    adapted = training_memory(config, replace(plain, adapters=1000))
    assert adapted.reference == 0
    assert adapted.optimizer == 2 * 4 * 1000 / 8


def test_a_sequence_longer_than_a_pass_counts_in_full() -> None:
    config, short = model("Qwen3-8B"), TrainingSetup(layout=Layout(data=8), pack_tokens=1024)
    long = training_memory(config, replace(short, longest=8192))
    assert long.activations == pytest.approx(8 * training_memory(config, short).activations)


def test_cpus_keep_kernels_of_bfloat16_for_each_size_of_a_pass_up_to_a_limit() -> None:
    config, plain = model("Qwen3-8B"), replace(LEAN, layout=Layout(data=8), gloo=True, pass_sizes=1)

    def total(**changes: Any) -> float:
        return training_memory(config, replace(plain, **changes)).total

    # 4 shapes of linear layers (query and output are square) and the head, each with two gradients: 15 kernels.
    assert total(pass_sizes=2) - total() == pytest.approx(15 * 0.58e6)
    assert total(pass_sizes=1000) == total(pass_sizes=2000) == total(pass_sizes=0) + (1024 - 5) * 0.58e6
    assert total(dtype="float32", pass_sizes=1) == total(dtype="float32", pass_sizes=1000)
    assert total(gloo=False, pass_sizes=1) == total(gloo=False, pass_sizes=1000)
    # LoRA: frozen weights have no gradients, but 5 shapes of adapters have.
    assert total(adapters=1000, pass_sizes=2) - total(adapters=1000) == pytest.approx((5 * 2 + 5 * 3) * 0.58e6)


def test_the_head_of_sharded_ranks_is_gathered_twice_while_it_scores() -> None:
    config = model("Qwen3-8B")
    lora = TrainingSetup(dtype="bfloat16", recompute="full", pack_tokens=64, adapters=1000, layout=Layout(data=8))
    table = 2 * Decoder.of(config).table
    assert training_memory(config, lora).working >= 2 * table


def test_a_config_without_sizes_is_refused() -> None:
    with pytest.raises(RollartError, match="no 'hidden_size'"):
        training_memory({"num_attention_heads": 4}, LEAN)


def test_candidates_can_all_be_laid_out_and_start_with_data_parallelism() -> None:
    config = model("Qwen3-235B-A22B")
    found = list(candidates(16, config))
    assert found[0] == Layout(data=16)
    assert not any(any(misfits(layout, config)) for layout in found)
    order = [(layout.tensor, layout.context, layout.expert) for layout in found]
    assert order == sorted(order)
    assert all(layout.tensor == layout.expert == 1 for layout in candidates(16, config, adapters=True))


def test_the_first_layout_that_fits_is_chosen() -> None:
    config, room = model("Qwen3-32B"), 72e9
    chosen = choose(config, LEAN, 16, room)
    assert chosen is not None
    earlier = list(candidates(16, config))
    earlier = earlier[: earlier.index(chosen.layout)]
    assert earlier
    assert all(training_memory(config, replace(LEAN, layout=layout)).total > room for layout in earlier)
    assert chosen.memory.total <= room
    assert choose(config, LEAN, 2, room) is None


def test_what_does_not_fit_gets_a_proposal_that_does() -> None:
    config = model("Qwen3-8B")
    text = proposal(config, replace(LEAN, dtype="float32", recompute="none"), 8, 72e9)
    assert "dtype: bfloat16" in text
    more = proposal(config, replace(LEAN, offload=("optimizer", "activations"), pack_tokens=1 << 20), 1, 24e9)
    assert " ranks with training:" in more
