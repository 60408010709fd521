"""Engines and environments that answer after drawn delays with drawn tokens, in processes of their own, on real
sockets: the load of `benchmarks.controller_load`. Every connection is one engine, or one environment."""

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rollart.core.types import Completion, EngineStatus, TokenPart
from rollart.engines.client import push_handler
from rollart.engines.contexts import KeptContexts, StreamRequest
from rollart.launch import service
from rollart.launch.rpc import Handler, Stream

WORDS = 50_000  # of the vocabulary; token n is the word w{n}


class ScriptedEngines:
    """`delay` is the mean seconds of an answer of `answer` tokens; `end` is the token that ends it."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._delay, self._answer, self._end = spec["delay"], spec["answer"], spec["end"]
        self._rng = random.Random(spec["seed"])
        self._running = 0

    async def stream(self, asked: StreamRequest, stream: Stream) -> Completion:
        self._running += 1
        try:
            return await self._generate(asked, stream)
        finally:
            self._running -= 1

    async def _generate(self, asked: StreamRequest, stream: Stream) -> Completion:
        rng, count = self._rng, self._answer
        tokens = [rng.randrange(100, WORDS) for _ in range(count - 1)] + [self._end]
        logprobs, versions = [-rng.random() for _ in tokens], [0] * count
        parts = [(0, 1), *((at, min(at + asked.every, count)) for at in range(1, count, asked.every))]
        pause = 2 * self._delay * rng.random() / len(parts)
        for start, stop in parts[:-1]:  # the last ones come with the answer
            await asyncio.sleep(pause)
            stream(TokenPart(tokens[start:stop], logprobs[start:stop], versions[start:stop]))
        await asyncio.sleep(pause)
        context = len(asked.request.tokens)
        return Completion(
            tokens, logprobs, versions, "stop", prompt=context, cached=context // 2, decode_s=pause * len(parts)
        )

    async def status(self) -> EngineStatus:
        return EngineStatus(0, self._running, 0, 0, 0, 0, 0, 0, 0.0)

    async def abort(self, id: str) -> None:
        """Nothing is computed that could be saved."""


@asynccontextmanager
async def engines(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Handler]]:
    made = ScriptedEngines(spec)
    contexts = KeptContexts(made.stream)
    own = {"status": made.status, "statuses": push_handler(made.status), "abort": made.abort}
    yield {"stream": contexts.stream, "extend": contexts.extend, **own}


class ScriptedEnvironments:
    """A host: each connection is an environment, whose episodes have `turns` turns and observations of `observation`
    words, the first of `prompt`."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        self._rng = random.Random(spec["seed"])
        self._texts = [_draw(self._rng, spec["observation"]) for _ in range(64)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = 0
        try:
            if (await reader.readline()).strip().decode() != self._spec["key"]:
                return
            writer.write(b'{"pid": 1}\n')
            while line := await reader.readline():
                request = json.loads(line)
                value: Any = True  # of the calls that only ask what it is
                if request["call"] == "reset":
                    left, value = (
                        self._spec["turns"],
                        _draw(random.Random(request["args"]["seed"]), self._spec["prompt"]),
                    )
                    await asyncio.sleep(2 * self._spec["delay"] * self._rng.random())
                elif request["call"] == "step":
                    left -= 1
                    value = [self._rng.choice(self._texts), 1.0 if left <= 0 else 0.0, left <= 0]
                    await asyncio.sleep(2 * self._spec["delay"] * self._rng.random())
                writer.write(json.dumps({"id": request["id"], "value": value}).encode() + b"\n")
        except ConnectionError:
            pass  # its caller was killed
        finally:
            writer.close()


def _draw(rng: random.Random, words: int) -> str:
    return " ".join(f"w{rng.randrange(100, WORDS)}" for _ in range(words))


async def environments(spec: dict[str, Any]) -> None:
    server = await asyncio.start_server(ScriptedEnvironments(spec).serve, "127.0.0.1", 0, limit=1 << 22)
    print(json.dumps({"url": f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def serve(kind: str) -> None:
    """`engines` or `environments`, by the spec on stdin; until that closes."""
    if kind == "engines":
        service.main(engines)
    asyncio.run(environments(json.loads(sys.stdin.readline())))
