"""How the gates of a mixture weigh the experts that they choose."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollart.models.expert_gates import ExpertGates


@pytest.mark.parametrize("hidden", [64, 1024])
@pytest.mark.parametrize("normalised", [True, False])
def test_weights_are_those_of_the_gate(hidden: int, normalised: bool) -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": normalised}
    with torch.no_grad():
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(hidden_size=hidden, intermediate_size=8, **sizes, **experts))
        gates = ExpertGates.of(model)
        assert gates is not None and gates.normalised == normalised
        logits, weights, chosen = gates.modules[0](torch.randn(5, hidden))
        torch.testing.assert_close(gates.weights(logits.softmax(-1), chosen), weights)
