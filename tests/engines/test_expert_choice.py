"""The experts that the embedded engine reports are those that it used."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from steppers import run, text
from tiny_decoders import decoder, request, twin
from torch import Tensor

from rollart.config import EngineConfig
from rollart.core.errors import EngineFailed
from rollart.core.expert_choice import ChoiceShape, ExpertChoices, join
from rollart.core.types import Completion, GenerationRequest
from rollart.engines.torch.model import EngineModel
from rollart.engines.torch.stepper import Stepper
from rollart.models.disk_names import DiskNames, cut

SHAPE = ChoiceShape(2, 2, 1)


def engine(network: Any, **config: Any) -> Stepper:
    return Stepper(EngineModel(twin(network), record_experts=True), EngineConfig(**config))


@torch.inference_mode()
def plain(network: Any, tokens: list[int]) -> Tensor:
    """[tokens, layers, choices] of a plain forward pass."""
    chosen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, args, output: chosen.append(output[2]))
        for layer in network.model.layers
    ]
    network(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1)


def ids(choices: ExpertChoices | None) -> Tensor:
    assert choices is not None and choices.shape == SHAPE
    return torch.tensor(list(choices.data)).view(-1, 2, 2)


def used(network: Any, asked: GenerationRequest, made: Completion) -> bool:
    """Whether all of them are those of a plain forward pass."""
    assert made.experts is not None
    expected = plain(network, [*asked.tokens, *made.tokens[:-1]])[made.experts.start :]
    return torch.equal(ids(made.experts), expected)


def test_prefill_in_chunks_and_decoding_in_a_batch_report_what_each_token_used() -> None:
    rng, network = random.Random(0), decoder("qwen3_moe")
    asked = [request(str(n), text(rng, 5 + 17 * n), max_tokens=4 + n) for n in range(4)]
    made = run(engine(network, prefill_chunk=16, max_batch=3), *asked)
    assert all(used(network, one, made[one.id]) for one in asked)


def test_a_shared_prefix_and_a_second_turn_need_no_prefill_to_be_known() -> None:
    rng, network = random.Random(1), decoder("qwen3_moe")
    stepper, prompt = engine(network), text(rng, 40)
    first, second = (request(name, [*prompt, *text(rng, 3)], max_tokens=6) for name in ("a", "b"))
    made = run(stepper, first) | run(stepper, second)
    assert made["b"].cached >= 32 and used(network, second, made["b"])
    known = made["a"].experts
    assert known is not None
    again = replace(
        request("a/1", [*first.tokens, *made["a"].tokens, *text(rng, 5)], session="a", max_tokens=6),
        experts_known=known.stop,
    )
    more = run(stepper, again)["a/1"]
    assert more.cached >= known.stop - 1 and more.experts is not None and more.experts.start == known.stop
    whole = [*again.tokens, *more.tokens]
    joined = join([known, more.experts], len(whole))
    assert torch.equal(ids(joined)[:-1], plain(network, whole[:-1]))
    assert (ids(joined)[-1] == 255).all()  # nothing was computed with the last token


def test_what_was_used_stays_known_when_new_weights_compute_a_context_again(tmp_path: Path) -> None:
    """The tokens before the swap were sampled with the old experts."""
    network, other = decoder("qwen3_moe"), decoder("qwen3_moe", seed=1)
    stepper, asked = engine(network), request("a", text(random.Random(2), 20), max_tokens=10)
    stepper.add(stepper.accept(asked))
    for _ in range(5):
        stepper.step()
    names = DiskNames(other)
    weights = {
        part.name: values.view(part.shape)
        for name, value in other.state_dict().items()
        for part, values, _ in cut(names.of(name, value.shape), value, 0)
    }
    stepper.swap(1, stepper._model.prepare(weights))
    (made,) = run(stepper).values()
    before = made.versions.count(0)
    tokens = [*asked.tokens, *made.tokens[:-1]]
    old, new = plain(network, tokens), plain(other, tokens)
    split = len(asked.tokens) + before - 1
    assert 0 < before < 10 and not torch.equal(old[:split], new[:split])
    assert torch.equal(ids(made.experts), torch.cat((old[:split], new[split:])))


def test_kv_from_another_engine_leaves_experts_unknown() -> None:
    sequence = engine(decoder("qwen3_moe")).accept(request("a", [1, 2, 3], max_tokens=4))
    sequence.record_experts(2, b"\x01\x02\x03\x00", SHAPE)
    assert (ids(ExpertChoices(0, SHAPE, bytes(sequence.experts)))[:2] == 255).all()


def test_more_than_255_experts_take_two_bytes() -> None:
    assert [ChoiceShape.of(3, 8, experts).row for experts in (255, 256)] == [24, 48]


def test_a_dense_model_has_none_to_record() -> None:
    with pytest.raises(EngineFailed, match="has no experts"):
        EngineModel(decoder("qwen3"), record_experts=True)
    made = run(Stepper(EngineModel(decoder("qwen3_moe")), EngineConfig()), request("a", [1, 2], max_tokens=2))
    assert made["a"].experts is None
