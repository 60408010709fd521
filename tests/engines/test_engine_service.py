import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from plain_weights import at
from tiny_decoders import decoder, request, worst

from rollart.core.errors import EngineFailed
from rollart.core.types import TokenPart
from rollart.engines.client import EngineClient
from rollart.engines.torch.pace import CREDIT_S
from rollart.engines.torch.service import build
from rollart.hardware.devices import device_class
from rollart.hardware.roofline import ModelShape, Roofline, decode
from rollart.launch import rpc
from rollart.weights.publish import publish

DEADLINE_S = 120.0


@asynccontextmanager
async def service(spec: dict[str, Any]) -> AsyncIterator[EngineClient]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollart.engines.torch.service"),
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
    networks[3].save_pretrained(tmp_path / "model")
    publication = publish(tmp_path / "weights", 4, networks[4].state_dict())
    spec = {"model": str(tmp_path / "model"), "weights": str(tmp_path / "weights"), "seed": 1, "version": 3}

    async def body() -> None:
        async with service({**spec, "config": {"max_batch": 8, "prefill_chunk": 16}}) as engine:
            group = [request(str(index), [index] * 30, max_tokens=12) for index in range(12)]
            for completion, asked in zip(await asyncio.gather(*map(engine.generate, group)), group, strict=True):
                assert set(completion.versions) == {3}
                assert worst(networks, asked, completion) <= 1e-4
            await engine.load(publication)
            asked = request("after", [5] * 40, max_tokens=12)
            completion = await engine.generate(asked)
            assert set(completion.versions) == {4} and worst(networks, asked, completion) <= 1e-4
            running = asyncio.create_task(engine.generate(request("long", [1], max_tokens=500)))
            while (await engine.status()).running == 0:
                pass
            await engine.abort("long")
            assert (await running).finish == "abort"
            received: list[int] = []

            def on_part(part: TokenPart) -> bool:
                received.extend(part.tokens)
                return len(received) >= 5

            asked = request("enough", [7] * 20, max_tokens=500)
            completion = await engine.generate_in_parts(asked, 1, on_part)
            assert len(received) == 5 and completion.tokens[:5] == received and len(completion.tokens) < 500
            assert completion.finish == "length" and worst(networks, asked, completion) <= 1e-4
            with pytest.raises(EngineFailed, match="vocabulary"):
                await engine.generate(request("bad", [99999]))
            with pytest.raises(EngineFailed, match="version 9 was not loaded"):
                await engine.load(at(9))

    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))


@pytest.mark.slow
def test_a_model_folder_serves_its_own_weights_until_others_are_loaded(tmp_path: Path) -> None:
    network = decoder("llama", seed=4)
    network.save_pretrained(tmp_path / "model")
    spec = {"model": str(tmp_path / "model"), "weights": str(tmp_path / "weights"), "seed": 1, "version": 0}

    async def body() -> None:
        async with service({**spec, "config": {}}) as engine:
            asked = request("1", [1, 2, 3], max_tokens=5)
            completion = await engine.generate(asked)
            assert worst({0: network}, asked, completion) <= 1e-4

    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))


@pytest.mark.slow
def test_one_process_prefills_and_another_decodes_the_same_until_the_first_is_killed(tmp_path: Path) -> None:
    network = decoder("llama", seed=4)
    network.save_pretrained(tmp_path / "model")
    spec = {"model": str(tmp_path / "model"), "weights": str(tmp_path / "weights"), "seed": 1, "version": 0}
    spec["config"] = {"prefill_chunk": 64}

    async def converse(a: EngineClient, b: EngineClient) -> None:
        context = list(range(40))
        for turn in range(3):
            asked = request(f"{turn}", context, "s", max_tokens=8, seed=turn)
            assert await a.prefill(asked) > 0
            done = await b.generate(replace(asked, kv_from=a.url))
            assert done.fetched > 0 and done.cached == len(context) - 1
            assert worst({0: network}, asked, done) <= 1e-4
            alone = await b.generate(replace(asked, id="alone", session="alone"))
            assert done.tokens == alone.tokens
            assert done.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
            context = [*context, *done.tokens, 1, 2, 3]

    async def body() -> None:
        async with service(spec) as b:
            asked = request("orphan", [9] * 30, max_tokens=8, seed=1)
            # An error in the block kills the process.
            with contextlib.suppress(KeyError):
                async with service(spec) as a:
                    await converse(a, b)
                    await a.prefill(asked)
                    raise KeyError
            done = await b.generate(replace(asked, kv_from=a.url))
            assert done.fetched == 0 and worst({0: network}, asked, done) <= 1e-4

    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))


def test_an_emulated_engine_says_so_in_its_log_and_in_its_status(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    decoder("llama", seed=4).save_pretrained(tmp_path / "model")
    spec = {"model": str(tmp_path / "model"), "weights": str(tmp_path / "weights"), "seed": 1, "version": 0}
    emulate = {"device": asdict(device_class("H20")), "slowdown": 100_000}
    capfd.readouterr()

    async def body() -> None:
        async with build({**spec, "config": {}, "emulate": emulate}) as methods:
            assert (await methods["status"]()).emulated == "H20, 100000 times slower"
            done = await methods["generate"](request("1", [1, 2, 3], max_tokens=5))
            shape = ModelShape.of_folder(tmp_path / "model")
            step = Roofline(device_class("H20"), shape, 100_000).seconds(decode(1, 1))
            assert done.queue_s + done.prefill_s + done.decode_s >= 5 * step - CREDIT_S

    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))
    first = capfd.readouterr().err.splitlines()[0]
    assert first == "this engine EMULATES a device: H20, 100000 times slower"
