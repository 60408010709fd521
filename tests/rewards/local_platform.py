"""A platform on loopback that speaks plain HTTP and the invoke protocols of Lambda and Function Compute.

The function runs for real, in the runtime that packages have. `script` holds what happens to the next requests instead:
a status, a raw answer, headers, or an event that is waited for before the function is called.
"""

import asyncio
import base64
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from rollart.core.types import Episode, EpisodeTurn, Message
from rollart.rewards.runtime import Runtime


@dataclass
class Happens:
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    until: asyncio.Event | None = None


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: bytes
    cancelled: bool = False


class Platform:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.script: list[Happens] = []
        self.seen: list[Seen] = []
        self.now = self.most = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        seen = Seen(request.path, dict(request.headers), await request.read())
        self.seen.append(seen)
        happens = self.script.pop(0) if self.script else Happens()
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if happens.until is not None:
                await happens.until.wait()
            if happens.body is not None or happens.status != 200:
                return web.Response(status=happens.status, body=happens.body or b"{}", headers=happens.headers)
            status, body, headers = await asyncio.to_thread(self.call, seen)
            return web.Response(status=status, body=body, headers=headers)
        except asyncio.CancelledError:
            seen.cancelled = True
            raise
        finally:
            self.now -= 1

    def call(self, seen: Seen) -> tuple[int, bytes, dict[str, str]]:
        if "/functions/" not in seen.path:
            return *self.runtime.http("POST", seen.headers, seen.body), {"Content-Type": "application/json"}
        log = base64.b64encode(b"REPORT Duration: 9.2 ms Billed Duration: 10 ms Init Duration: 80 ms").decode()
        answer: Any = self.runtime.event(seen.body)
        return 200, web.json_response(answer).body, {"X-Amz-Log-Result": log, "Content-Type": "application/json"}


@asynccontextmanager
async def platform(function: str, secret: str = ""):
    served = Platform(Runtime(function, secret))
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/{path:.*}", served.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield served
    finally:
        await runner.cleanup()


def episode(id: str = "e", **info: Any) -> Episode:
    return Episode(id, "t", 1, (EpisodeTurn((Message("user", "hi"),), "act", 0.25),), info=info)
