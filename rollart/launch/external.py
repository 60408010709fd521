"""An engine that someone else runs: reached by its URL, never started or stopped."""

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from rollart.launch import rpc

KEY = "ROLLART_ENGINE_KEY"  # environment variable: the key of external engines


class ExternalService:
    """Implements `rollart.launch.launcher.ServiceHandle`; it ends when its connection is lost."""

    pid = 0
    node_lost = False

    def __init__(self, name: str, url: str, device: str) -> None:
        self.name, self.node, self.address, self.device = name, url, url, device
        self.answer: Mapping[str, Any] = {"url": url}
        self._client: rpc.RpcClient | None = None

    async def connect(self, stack: AsyncExitStack) -> rpc.RpcClient:
        """Raises ServiceError."""
        self._client = await stack.enter_async_context(rpc.connected(self.address, key=os.environ.get(KEY)))
        return self._client

    async def wait(self) -> str:
        return await self._client.lost() if self._client is not None else f"{self.address} was never reached"

    async def stop(self) -> None:
        """It is not ours to stop."""

    def kill(self) -> None:
        """Disconnect: the supervisor connects again later."""
        if self._client is not None:
            self._client.fail(f"{self.address} was disconnected")
