"""The embedded engine as a process: `python -m rollart.engines.service`, spec on stdin.

The spec: `model` (a Hugging Face folder), `weights` (folder of the weight store), `config` (the run file's `engine`
section), `seed`, and `version`, which is taken from the store if it is there and else names the model's own weights.
Optional: `emulate`, the `device` (fields of DeviceClass) whose roofline paces the engine, and its `slowdown`.
"""

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from rollart.config import Engine as EngineConfig
from rollart.engines.torch.engine import TorchEngine
from rollart.engines.torch.model import Model
from rollart.engines.torch.pace import label
from rollart.resources.devices import DeviceClass
from rollart.resources.roofline import ModelShape, Roofline
from rollart.services.device import torch_device
from rollart.services.process import main
from rollart.services.rpc import Handler
from rollart.weights.store import WeightStore


@asynccontextmanager
async def build(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Handler]]:
    config = EngineConfig.model_validate(spec["config"])
    torch.set_num_threads(config.threads)
    store = WeightStore(Path(spec["weights"]))
    version = int(spec["version"])
    folder = Path(spec["model"])
    emulate = _emulated(spec["emulate"], folder) if spec.get("emulate") else None
    model = Model.open(folder, getattr(torch, config.dtype), torch_device(config.device, spec))
    if version in store.versions():
        model.replace(model.prepare(store.load(version)))
    async with TorchEngine(
        model, config, store=store, version=version, seed=int(spec["seed"]), emulate=emulate, key=spec.get("key")
    ) as engine:
        yield {
            "generate": engine.generate,
            "prefill": engine.prefill,
            "abort": engine.abort,
            "load": engine.load,
            "status": engine.status,
            "offer": engine.handover.offer,
            "more": engine.handover.more,
        }


def _emulated(emulate: Mapping[str, Any], folder: Path) -> Roofline:
    """What is emulated computes in bfloat16, whatever is computed with here."""
    roofline = Roofline(DeviceClass(**emulate["device"]), ModelShape.of_folder(folder), float(emulate["slowdown"]))
    print(f"this engine EMULATES a device: {label(roofline)}", file=sys.stderr, flush=True)
    return roofline


if __name__ == "__main__":
    main(build)
