"""An HTTP client without a network, which can leave in the middle of an answer."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from rollart.gateway.app import App


class Left(Exception):
    """The client left before it had everything."""


async def post(
    app: App, path: str, body: Mapping[str, Any], key: str, *, leave_after: int | None = None
) -> tuple[int, Any]:
    """Status and JSON, or the list of streamed events. `leave_after` so many pieces of the answer; 0: before it."""
    there, gone = asyncio.Event(), asyncio.Event()
    if leave_after == 0:
        gone.set()
    asked, status, pieces = False, 0, []

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            return
        pieces.append(message["body"])
        if leave_after is not None and len(pieces) >= leave_after:
            gone.set()
            await asyncio.sleep(0)  # as a socket would, the server notices a little later
            await asyncio.sleep(0)
        if not message.get("more_body"):
            there.set()

    headers = [(b"authorization", f"Bearer {key}".encode())]
    await app({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)
    if not there.is_set():
        raise Left
    whole = b"".join(pieces)
    if whole.startswith((b"data:", b"event:")):
        return status, [json.loads(line[6:]) for line in whole.decode().splitlines() if line.startswith("data: {")]
    return status, json.loads(whole)
