"""A mixture of experts in vLLM: the experts that it reports are those that it used."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_fleet import MOE, NEEDS_VLLM, START_S, Versions, fronted, request, settings

from rollart.core.expert_choice import ChoiceShape, ExpertChoices
from rollart.core.types import Completion, GenerationRequest

pytestmark = [pytest.mark.slow, NEEDS_VLLM, pytest.mark.timeout(1800)]


@torch.inference_mode()
def agreement(network: Any, asked: GenerationRequest, made: Completion) -> float:
    """Share of the choices that are those of a plain forward pass; the order of a token's experts does not matter."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, args, output: chosen.append(output[2]))
        for layer in network.model.layers
    ]
    network(torch.tensor([[*asked.tokens, *made.tokens[:-1]]]))
    for hook in hooks:
        hook.remove()
    assert isinstance(made.experts, ExpertChoices) and made.experts.shape == ChoiceShape(2, 2, 1)
    assert made.experts.start == asked.experts_known
    expected = torch.stack(chosen, 1)[made.experts.start :]
    got = torch.tensor(list(made.experts.data)).view(-1, 2, 2)
    assert got.shape == expected.shape
    return float((got.sort(-1).values == expected.sort(-1).values).all(-1).float().mean())


def test_a_server_returns_the_experts_of_every_token_whatever_is_cached(tmp_path: Path) -> None:
    versions = Versions.made(tmp_path, MOE)
    first = request("a", [5 + at % 50 for at in range(80)], max_tokens=12, seed=1)

    async def body() -> None:
        async with fronted(versions, tmp_path, record_experts=True) as front:
            for version in (0, 1):
                if version:
                    versions.publish(version)
                    await front.engine.load(versions.published(version))
                made = await front.engine.generate(replace(first, id=f"a{version}"))
                assert agreement(versions.networks[version], first, made) > 0.99
                assert set(made.versions) == {version} and versions.worst(first, made) <= 1e-4
                assert made.experts is not None
                context = [*first.tokens, *made.tokens, *range(20, 30)]
                second = replace(request(f"b{version}", context, max_tokens=6), experts_known=made.experts.stop)
                more = await front.engine.generate(second)
                assert more.cached >= 64 and agreement(versions.networks[version], second, more) > 0.99

    asyncio.run(asyncio.wait_for(body(), START_S))


def test_workers_that_have_whole_experts_take_new_weights(tmp_path: Path) -> None:
    """Only the weights: vLLM's kernel for CPUs crashes when experts are spread."""
    versions = Versions.made(tmp_path, MOE)
    versions.publish(1)

    async def body() -> None:
        spread = settings(args=["--enable-expert-parallel"])
        async with fronted(versions, tmp_path, tensor_parallel=2, vllm=spread) as front:
            assert (await front.engine.load(versions.published(1))).version == 1

    asyncio.run(asyncio.wait_for(body(), START_S))
