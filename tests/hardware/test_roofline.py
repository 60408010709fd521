import json
from pathlib import Path

import pytest

from rollart.config import TinyModelConfig
from rollart.core.errors import RollartError
from rollart.hardware.devices import CATALOGUE
from rollart.hardware.roofline import ModelShape, Roofline, Work, decode, prefill
from rollart.models import tiny

LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def test_llama_3_8b_has_its_8_billion_parameters() -> None:
    shape = ModelShape.of(LLAMA)
    assert shape.parameters == pytest.approx(8.03e9, rel=0.002)
    assert shape.kv_bytes == 131072
    assert shape.dense == shape.parameters - 128256 * 4096  # the input embedding is only looked up


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe"])
def test_a_tiny_models_shape_is_known_without_making_it(architecture: str) -> None:
    config = TinyModelConfig(architecture=architecture, hidden=96, layers=2, heads=3, kv_heads=1)
    made = sum(parameter.numel() for parameter in tiny.architecture(config).parameters() if parameter.dim() > 1)
    assert ModelShape.of(tiny.sizes(config)).parameters == made


def test_the_shape_is_read_from_a_folder_and_a_missing_number_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelShape.of_folder(tmp_path, 4).kv_bytes == 2 * 131072
    with pytest.raises(RollartError, match="has no 'vocab_size'"):
        ModelShape.of({key: value for key, value in LLAMA.items() if key != "vocab_size"})


def test_a_pass_reads_only_the_experts_it_touches() -> None:
    shape = ModelShape(dense=100, layers=1, heads=1, kv_heads=1, head_dim=1, expert=10, experts=8, experts_per_token=2)
    assert shape.weight_bytes(1) == pytest.approx((100 + 10 * 2) * 2)
    assert shape.weight_bytes(1000) == pytest.approx((100 + 10 * 8) * 2)


def test_prefill_is_bound_by_compute_and_decode_by_memory() -> None:
    roofline = Roofline(CATALOGUE["H800"], ModelShape.of(LLAMA))
    long, step = prefill(4096, 0), decode(8, 8 * 4096)
    assert roofline.seconds(long) == roofline.compute_seconds(long) > roofline.memory_seconds(long)
    assert roofline.seconds(step) == roofline.memory_seconds(step) > roofline.compute_seconds(step)


def test_per_price_h800_prefills_better_and_h20_decodes_better() -> None:
    shape = ModelShape.of(LLAMA)
    cost = {
        (name, what): Roofline(CATALOGUE[name], shape).seconds(work) * CATALOGUE[name].price
        for name in ("H800", "H20")
        for what, work in (("prefill", prefill(4096, 0)), ("decode", decode(16, 16 * 8192)))
    }
    assert cost["H800", "prefill"] < cost["H20", "prefill"] / 2
    assert cost["H20", "decode"] < cost["H800", "decode"] / 3


def test_slowdown_and_shared_work_scale_the_time() -> None:
    shape, work = ModelShape.of(LLAMA), prefill(100, 50)
    one = Roofline(CATALOGUE["H20"], shape)
    assert Roofline(CATALOGUE["H20"], shape, slowdown=10).seconds(work) == pytest.approx(10 * one.seconds(work))
    assert Roofline(CATALOGUE["H20"], shape, devices=2).seconds(work) == pytest.approx(one.seconds(work) / 2)
    assert Roofline(CATALOGUE["H20"], shape, slowdown=10).transfer_seconds(7) == 10 * one.transfer_seconds(7)


def test_no_tokens_take_no_time() -> None:
    assert Roofline(CATALOGUE["H20"], ModelShape.of(LLAMA)).seconds(Work(0, 0, 0)) == 0


def test_prefill_in_two_parts_is_the_work_of_one() -> None:
    whole, parts = prefill(100, 0), prefill(60, 0) + prefill(40, 60)
    assert (whole.tokens, whole.attended) == (parts.tokens, parts.attended)
