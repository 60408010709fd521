"""The embedded engine as a process: `python -m rollart.engines.torch.service`, spec on stdin.

The spec: `model` (a Hugging Face folder), `version` (that of its weights), `weights` (folder of the weight store on
this node, created if missing), `config` (the run file's `engine` section) and `seed`. Optional: `emulate`, the `device`
(fields of DeviceClass) whose roofline paces the engine, and its `slowdown`; `record_experts`, to return which experts
of a mixture were used; `lora`, that section of the run file, if adapters are published.
"""

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import torch

from rollart.config import EngineConfig, LoraConfig
from rollart.engines.client import push_handler
from rollart.engines.contexts import KeptContexts
from rollart.engines.torch.engine import TorchEngine
from rollart.engines.torch.model import EngineModel
from rollart.engines.torch.pace import emulation_label
from rollart.hardware.devices import DeviceClass
from rollart.hardware.roofline import ModelShape, Roofline
from rollart.launch.rpc import Handler
from rollart.launch.service import LOOPBACK, main, torch_device
from rollart.weights.reader import WeightReader


@asynccontextmanager
async def build(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Handler]]:
    config = EngineConfig.model_validate(spec["config"])
    torch.set_num_threads(config.thread_count)
    folder = Path(spec["model"])
    emulate = _emulated(spec["emulate"], folder) if spec.get("emulate") else None
    model = EngineModel.open(
        folder,
        getattr(torch, config.dtype),
        torch_device(config.device, spec),
        record_experts=bool(spec.get("record_experts")),
        adapter_scale=LoraConfig.model_validate(spec.get("lora") or {}).scale,
    )
    async with AsyncExitStack() as stack:
        weights = stack.enter_context(closing(_weights(spec)))
        engine = await stack.enter_async_context(
            TorchEngine(
                model,
                config,
                store=weights,
                version=int(spec["version"]),
                seed=int(spec["seed"]),
                emulate=emulate,
                key=spec.get("key"),
            )
        )
        contexts = KeptContexts(engine.stream)
        yield {
            "generate": engine.generate,
            "stream": contexts.stream,
            "extend": contexts.extend,
            "prefill": engine.prefill,
            "abort": engine.abort,
            "load": engine.load,
            "status": engine.status,
            "statuses": push_handler(engine.status),
            "offer": engine.kv_server.offer,
            "more": engine.kv_server.more,
        }


def _weights(spec: Mapping[str, Any]) -> WeightReader:
    return WeightReader(Path(spec["weights"]), bind=spec.get("bind", LOOPBACK))


def _emulated(emulate: Mapping[str, Any], folder: Path) -> Roofline:
    """The emulated device computes in bfloat16, whatever the dtype here."""
    roofline = Roofline(DeviceClass(**emulate["device"]), ModelShape.of_folder(folder), float(emulate["slowdown"]))
    print(f"this engine EMULATES a device: {emulation_label(roofline)}", file=sys.stderr, flush=True)
    return roofline


if __name__ == "__main__":
    main(build)
