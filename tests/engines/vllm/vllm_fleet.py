"""Real vLLM servers behind our service, tiny models to serve, versions to publish, and a plain forward pass."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollart.config import TinyModelConfig, VllmConfig
from rollart.config.hardware import VLLM_PYTHON
from rollart.core.types import Completion, GenerationRequest, Publication, Sampling
from rollart.engines.client import EngineClient
from rollart.launch import rpc
from rollart.launch.launcher import ResourceRequest, ServiceHandle, service_command
from rollart.launch.local import LocalLauncher
from rollart.models.disk_names import DiskNames, cut
from rollart.models.tiny import make
from rollart.weights.publish import Publisher, TensorShard
from rollart.weights.store import Store

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get(VLLM_PYTHON) or ROOT / ".venv-vllm" / "bin" / "python")
NEEDS_VLLM = pytest.mark.skipif(
    VLLM_PYTHON not in os.environ and not PYTHON.exists(),
    reason=f"no Python with vLLM: {PYTHON} is missing; `make test-vllm` makes it",
)
DEADLINE_S = 280.0
START_S = 900.0  # alone on a machine it takes half a minute
TINY = TinyModelConfig(hidden=64, layers=2, heads=2, kv_heads=1, context=512)
MOE = TinyModelConfig(architecture="qwen3_moe", hidden=64, layers=2, heads=2, kv_heads=2, context=512)


@dataclass
class Versions:
    """Version 0 is the model in `folder`, the others are published in `store`."""

    folder: Path
    store: Path
    tiny: TinyModelConfig = TINY
    networks: dict[int, Any] = field(default_factory=dict)
    _publications: dict[int, Publication] = field(default_factory=dict)

    @classmethod
    def made(cls, path: Path, tiny: TinyModelConfig = TINY) -> "Versions":
        versions = cls(make(tiny, path / "model", seed=0), path / "weights", tiny)
        versions.networks[0] = network(versions.folder)
        return versions

    def publish(self, version: int) -> None:
        """Other random weights of the same shape, louder than fresh ones, so that each token matters."""
        folder = make(self.tiny, self.folder.parent / f"version-{version}", seed=version)
        made = self.networks[version] = network(folder)
        with torch.no_grad():
            for weight in made.parameters():
                weight *= 1.5
        names = DiskNames(made)
        shares = [
            TensorShard(part.name, part.shape, run, at)
            for name, value in made.state_dict().items()
            for part, run, at in cut(names.of(name, value.shape), value, 0)
        ]
        Publisher(Store(self.store)).publish(version, "aa", shares)
        self._publications[version] = Publication(version, "aa", (("http://127.0.0.1:1",),))

    def published(self, version: int) -> Publication:
        return self._publications.get(version) or Publication(version, "aa", (("http://127.0.0.1:1",),))

    def worst(self, asked: GenerationRequest, completion: Completion) -> float:
        """The largest distance of a logprob from that of a plain forward pass with the weights of its version."""
        gap = 0.0
        got, made = torch.tensor(completion.logprobs), torch.tensor(completion.versions)
        assert len(got) == len(made) == len(completion.tokens)
        for version in set(completion.versions):
            expected = plain(self.networks[version], asked, completion)
            gap = max(gap, float((expected - got)[made == version].abs().max()))
        return gap


def network(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def plain(model: Any, asked: GenerationRequest, completion: Completion) -> torch.Tensor:
    ids = torch.tensor([asked.tokens + completion.tokens])
    logits = model(ids).logits[0, len(asked.tokens) - 1 : -1].float() / asked.sampling.temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens).unsqueeze(1)).squeeze(1)


def request(name: str, tokens: list[int], **sampling: Any) -> GenerationRequest:
    return GenerationRequest(name, name, "test", 0, tokens, Sampling(**sampling))


def settings(**more: Any) -> dict[str, Any]:
    return VllmConfig(python=PYTHON, start_deadline=START_S, **more).model_dump(mode="json")


def spec_of(versions: Versions, **more: Any) -> dict[str, Any]:
    config = {"max_batch": 16, "prefill_chunk": 64, "kv_megabytes": 64, "dtype": "float32"}
    return {
        "model": str(versions.folder),
        "weights": str(versions.store),
        "seed": 0,
        "version": 0,
        "classes": ["cpu"],
        "config": config | more.pop("config", {}),
        "vllm": settings(),
        **more,
    }


@dataclass
class Fronted:
    """A service, and what speaks to it."""

    engine: EngineClient
    started: ServiceHandle


@asynccontextmanager
async def fronted(
    versions: Versions, logs: Path, name: str = "vllm", launcher: LocalLauncher | None = None, **more: Any
) -> AsyncIterator[Fronted]:
    launcher = launcher or LocalLauncher()
    command = service_command("rollart.engines.vllm.service", spec_of(versions, **more), name=name, logs=logs)
    started = await launcher.launch(replace(command, start_deadline=START_S), ResourceRequest())
    try:
        client = await rpc.connect(started.answer["url"], key=launcher.key)
        engine = EngineClient(client, deadline=DEADLINE_S)
        try:
            yield Fronted(engine, started)
        finally:
            await engine.close()
    finally:
        await launcher.close()


async def begun(engine: EngineClient, *asked: GenerationRequest) -> list[asyncio.Task[Completion]]:
    """These requests, each with its first token there and more to come."""
    firsts = [asyncio.Event() for _ in asked]

    def start(one: GenerationRequest, first: asyncio.Event) -> asyncio.Task[Completion]:
        return asyncio.create_task(engine.generate_in_parts(one, 1, lambda part: bool(first.set())))

    running = [start(one, first) for one, first in zip(asked, firsts, strict=True)]
    async with asyncio.timeout(DEADLINE_S):
        for first in firsts:
            await first.wait()
    return running
