"""The service in front of a vLLM server: `python -m rollart.engines.vllm.service`, spec on stdin.

The spec is that of `rollart.engines.torch.service`, and: `vllm` (that section of the run file), `tensor_parallel`,
`kv_transfer` (whether servers may fetch KV from each other), and `url` of a server that someone else runs. When the
server ends, so does the service: its supervisor starts both again.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

from rollart.config import EngineConfig
from rollart.core.errors import RollartError, ServiceError
from rollart.engines.client import push_handler
from rollart.engines.contexts import KeptContexts
from rollart.engines.vllm import tensor_map
from rollart.engines.vllm.api import VllmApi
from rollart.engines.vllm.engine import VllmEngine
from rollart.engines.vllm.kv_transfer import KVPeers
from rollart.engines.vllm.server import VllmServer, started
from rollart.hardware.roofline import ModelShape
from rollart.launch.local import free_port
from rollart.launch.rpc import ENGINE_KEY, Handler
from rollart.launch.service import LOOPBACK, main
from rollart.weights.reader import WeightReader

HEALTH_S, MAX_MISSED = 3.0, 3  # health checks of a server that someone else runs
GRACE_S = (MAX_MISSED + 1) * 2 * HEALTH_S  # by then it is known whether the server is lost


@asynccontextmanager
async def build(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Handler]]:
    async with AsyncExitStack() as stack:
        try:
            engine = await _engine(spec, stack)
        except RollartError as error:
            print(json.dumps({"error": str(error)}), flush=True)
            raise
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
            "take_offer": engine.offers.take,
            "received": engine.offers.received,
        }


async def _engine(spec: dict[str, Any], stack: AsyncExitStack) -> VllmEngine:
    config, folder = EngineConfig.model_validate(spec["config"]), Path(spec["model"])
    server: VllmServer | None = None
    if "url" not in spec:
        spec = spec | {"side_channel": free_port(spec.get("bind", LOOPBACK))}
        server, url = await stack.enter_async_context(started(spec))
        api = await stack.enter_async_context(VllmApi(url, grace=GRACE_S))
    else:
        if spec.get("lora"):
            raise ServiceError(
                f"training.lora needs vLLM servers that rollart starts, with an adapter to replace; {spec['url']} is "
                "run by someone else"
            )
        api = await stack.enter_async_context(VllmApi(spec["url"], key=os.environ.get(ENGINE_KEY), grace=GRACE_S))
        if not await api.healthy(HEALTH_S):
            raise ServiceError(f"no vLLM server answers at {spec['url']}")

    def broken(reason: str) -> None:
        """Ends the process, so that all requests fail at once and the supervisor restarts it."""
        print(reason, file=sys.stderr, flush=True)
        if server is not None:
            server.discard()
        os._exit(1)

    watching = asyncio.create_task(_watch(api, server, broken))
    stack.callback(watching.cancel)
    peers = KVPeers(spec.get("key"))
    stack.push_async_callback(peers.close)
    engine = VllmEngine(
        api,
        config,
        weights=stack.enter_context(closing(WeightReader(Path(spec["weights"]), bind=spec.get("bind", "127.0.0.1")))),
        version=int(spec["version"]),
        token_bytes=ModelShape.of_folder(folder, 4 if config.dtype == "float32" else 2).kv_bytes,
        peers=peers,
        on_broken=broken,
        experts=ModelShape.of_folder(folder).experts if spec.get("record_experts") else 0,
        lora=spec.get("lora"),
    )
    # A server that we did not start may have any weights.
    await engine.adopt(tensor_map.in_folder(folder) if server is None else None)
    return engine


async def _watch(api: VllmApi, server: VllmServer | None, broken: Any) -> None:
    if server is not None:
        broken(await server.ended())
    missed = 0
    while missed < MAX_MISSED:
        await asyncio.sleep(HEALTH_S)
        missed = 0 if await api.healthy(HEALTH_S) else missed + 1
    broken(f"the vLLM server at {api.url} no longer responds")


if __name__ == "__main__":
    main(build)
