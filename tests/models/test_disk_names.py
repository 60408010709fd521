"""The names of weights in files, against what transformers writes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rollart.core.errors import RollartError
from rollart.models.disk_names import DiskNames, cut

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
}


def model(architecture: str) -> Any:
    torch.manual_seed(0)
    sizes = SIZES | MIXTURES.get(architecture, {})
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes))


@pytest.mark.parametrize("architecture", [*MIXTURES, "llama"])
def test_weights_have_the_names_shapes_and_values_of_the_files(tmp_path: Path, architecture: str) -> None:
    made = model(architecture)
    made.save_pretrained(tmp_path)
    files, state = load_file(tmp_path / "model.safetensors"), made.state_dict()
    names = DiskNames(made)
    found = {
        part.name: state[name].flatten()[part.start : part.stop].view(part.shape)
        for name in state
        for part in names.of(name, state[name].shape)
    }
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in files.items()}
    assert all(torch.equal(found[name], files[name]) for name in files)
    merged = names.merged(files, {name: tensor.shape for name, tensor in state.items()})
    assert merged.keys() == state.keys() and all(torch.equal(merged[name], state[name]) for name in state)


def test_ranks_that_hold_any_runs_of_experts_publish_each_element_once() -> None:
    made = model("qwen3_moe")
    name, whole = next((n, t) for n, t in made.state_dict().items() if n.endswith("gate_up_proj"))
    parts, flat = DiskNames(made).of(name, whole.shape), whole.flatten()
    published = {part.name: torch.full((part.stop - part.start,), torch.nan) for part in parts}
    bounds = [0, 1, 700, 701, 1536, 4000, flat.numel()]  # within matrices, across them, and at their ends
    for start, stop in pairwise(bounds):
        for part, values, at in cut(parts, flat[start:stop], start):
            target = published[part.name][at : at + len(values)]
            assert target.isnan().all()
            target.copy_(values)
    assert torch.equal(torch.cat(list(published.values())), flat)
    assert list(published)[:3] == [
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.mlp.experts.1.gate_proj.weight",
    ]


def test_an_expert_that_is_missing_is_named() -> None:
    made = model("qwen3_moe")
    state, names = made.state_dict(), DiskNames(made)
    files = {part.name: torch.zeros(part.shape) for name in state for part in names.of(name, state[name].shape)}
    del files["model.layers.1.mlp.experts.2.down_proj.weight"]
    with pytest.raises(RollartError, match=r"lack model\.layers\.1\.mlp\.experts\.2\.down_proj\.weight"):
        names.merged(files, {name: tensor.shape for name, tensor in state.items()})


def test_a_form_on_disk_that_is_not_known_is_refused() -> None:
    """Its experts are stored transposed."""
    config = AutoConfig.for_model("qwen3_vl_moe")
    config.text_config.update(SIZES | MIXTURES["qwen3_moe"])
    with torch.device("meta"):
        from transformers import Qwen3VLMoeForConditionalGeneration

        made = Qwen3VLMoeForConditionalGeneration(config)
    name, whole = next((n, t) for n, t in made.state_dict().items() if n.endswith("experts.gate_up_proj"))
    with pytest.raises(RollartError, match="in a form that cannot be published"):
        DiskNames(made).of(name, whole.shape)
