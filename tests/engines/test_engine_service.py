import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_decoders import decoder, request, worst

from rollart.engines.client import EngineClient
from rollart.errors import EngineFailed
from rollart.services import rpc
from rollart.weights.store import WeightStore

DEADLINE_S = 120.0


@asynccontextmanager
async def service(spec: dict[str, Any]) -> AsyncIterator[EngineClient]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollart.engines.service"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(spec).encode() + b"\n")
        ready = json.loads(await process.stdout.readline())
        client = EngineClient(await rpc.connect(ready["url"]), deadline=DEADLINE_S)
        yield client
        await client.close()
        process.stdin.close()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.slow
def test_an_engine_process_serves_swaps_aborts_and_ends_with_its_parent(tmp_path: Path) -> None:
    networks = {3: decoder(seed=1), 4: decoder(seed=2)}
    decoder(seed=9).save_pretrained(tmp_path / "model")
    store = WeightStore(tmp_path / "weights")
    for version, network in networks.items():
        store.publish(version, network.state_dict())
    spec = {"model": str(tmp_path / "model"), "weights": str(tmp_path / "weights"), "seed": 1, "version": 3}

    async def body() -> None:
        async with service({**spec, "config": {"max_batch": 8, "prefill_chunk": 16}}) as engine:
            group = [request(str(index), [index] * 30, max_tokens=12) for index in range(12)]
            for completion, asked in zip(await asyncio.gather(*map(engine.generate, group)), group, strict=True):
                assert set(completion.versions) == {3}
                assert worst(networks, asked, completion) <= 1e-4
            await engine.load(4)
            asked = request("after", [5] * 40, max_tokens=12)
            completion = await engine.generate(asked)
            assert set(completion.versions) == {4} and worst(networks, asked, completion) <= 1e-4
            running = asyncio.create_task(engine.generate(request("long", [1], max_tokens=500)))
            while (await engine.status()).running == 0:
                pass
            await engine.abort("long")
            assert (await running).finish == "abort"
            with pytest.raises(EngineFailed, match="vocabulary"):
                await engine.generate(request("bad", [99999]))
            with pytest.raises(EngineFailed, match="version 9 was not loaded"):
                await engine.load(9)

    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))


@pytest.mark.slow
def test_a_model_folder_serves_its_own_weights_when_the_store_has_none(tmp_path: Path) -> None:
    network = decoder("llama", seed=4)
    network.save_pretrained(tmp_path / "model")
    spec = {"model": str(tmp_path / "model"), "weights": str(tmp_path / "weights"), "seed": 1, "version": 0}

    async def body() -> None:
        async with service({**spec, "config": {}}) as engine:
            asked = request("1", [1, 2, 3], max_tokens=5)
            completion = await engine.generate(asked)
            assert worst({0: network}, asked, completion) <= 1e-4

    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))
