"""The trainer as the control plane sees it: the protocol, over a connection to the service."""

from pathlib import Path

from rollart.core.errors import EngineFailed
from rollart.core.types import Batch, StepMetrics
from rollart.launch.rpc import RpcClient
from rollart.weights.manifest import Publication


class TrainerClient:
    """Implements `rollart.core.protocols.Trainer`. Each call has `deadline` seconds; a failure is a ServiceError."""

    def __init__(self, client: RpcClient, deadline: float) -> None:
        self._client = client
        self._deadline = deadline
        self._published: dict[int, Publication] = {}

    async def step(self, batch: Batch) -> StepMetrics:
        return await self._client.call("step", batch, returns=StepMetrics, deadline=self._deadline)

    async def publish(self) -> int:
        publication = await self._client.call("publish", returns=Publication, deadline=self._deadline)
        self._published = {publication.version: publication}
        return publication.version

    def published(self, version: int) -> Publication:
        """Where engines find `version`: only the newest is to be had. Raises EngineFailed."""
        if version not in self._published:
            raise EngineFailed(f"version {version} is not to be had: the trainer has published {[*self._published]}")
        return self._published[version]

    async def save(self, path: Path) -> None:
        await self._client.call("save", str(path.absolute()), returns=type(None), deadline=self._deadline)

    async def load(self, path: Path) -> None:
        await self._client.call("load", str(path.absolute()), returns=type(None), deadline=self._deadline)
