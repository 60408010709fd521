"""A real vLLM server whose only adapter is replaced between the tokens of requests."""

import asyncio
import copy
from pathlib import Path

import pytest
import torch
from vllm_fleet import DEADLINE_S, NEEDS_VLLM, Versions, begun, fronted, request

from rollart.core.types import Publication
from rollart.models.adapters import adapters_of
from rollart.weights.publish import Publisher, TensorShard
from rollart.weights.store import Store

pytestmark = [pytest.mark.slow, NEEDS_VLLM, pytest.mark.timeout(1800)]
LORA = {"rank": 3, "alpha": 6.0}


def publish_adapter(versions: Versions, version: int) -> None:
    """A random one of every linear layer; the version's network is the first one with it."""
    draw = torch.Generator().manual_seed(version)
    made = versions.networks[version] = copy.deepcopy(versions.networks[0])
    tensors = {}
    for name, weight in made.state_dict().items():
        if name.endswith("_proj.weight"):
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{layer}.lora_A.weight"] = torch.randn(3, weight.shape[1], generator=draw) / 8
            tensors[f"{layer}.lora_B.weight"] = torch.randn(weight.shape[0], 3, generator=draw) / 2
    with torch.no_grad():
        for name, adapter in adapters_of(tensors, LORA["alpha"] / LORA["rank"]):
            weight = made.get_parameter(name)
            weight.copy_(adapter.merged(weight))
    shares = [TensorShard(name, tuple(value.shape), value) for name, value in tensors.items()]
    Publisher(Store(versions.store)).publish(version, "aa", shares)


def test_adapters_are_replaced_in_place_between_the_tokens_of_a_request(tmp_path: Path) -> None:
    versions = Versions.made(tmp_path)

    async def body() -> None:
        async with fronted(versions, tmp_path, lora=LORA) as front, asyncio.timeout(DEADLINE_S):
            engine = front.engine
            asked = request("a", list(range(5, 35)), seed=1, max_tokens=16)
            assert versions.worst(asked, await engine.generate(asked)) <= 1e-4  # the empty adapter adds nothing
            for version in (1, 2):
                long = request(f"long-{version}", list(range(5, 35)), seed=version, max_tokens=400)
                (running,) = await begun(engine, long)
                publish_adapter(versions, version)
                loaded = await engine.load(Publication(version, "aa", (("http://127.0.0.1:1",),)))
                assert loaded.version == version
                made = await running
                assert set(made.versions) == {version - 1, version}
                assert versions.worst(long, made) <= 1e-4
                again = request(f"again-{version}", list(range(5, 35)), seed=1, max_tokens=16)  # no KV of the old one
                assert versions.worst(again, await engine.generate(again)) <= 1e-4

    asyncio.run(body())
