"""The trainer as the control plane sees it: a client of its service, and the files of its checkpoints. No torch."""

from pathlib import Path

from rollart.core.types import Batch, Publication, StepMetrics
from rollart.launch.rpc import RpcClient

MANIFEST = "checkpoint.json"
OPTIMIZER = "optimizer.safetensors"
REFERENCE = "reference.safetensors"
TRAINER_FILES = (MANIFEST, OPTIMIZER, REFERENCE)  # what a checkpoint adds to a Hugging Face folder


class TrainerClient:
    """Implements `rollart.core.protocols.Trainer`. Each call has `deadline` seconds; a failure is a ServiceError."""

    def __init__(self, client: RpcClient, deadline: float) -> None:
        self._client, self._deadline = client, deadline

    async def step(self, batch: Batch) -> StepMetrics:
        return await self._client.call("step", batch, returns=StepMetrics, deadline=self._deadline)

    async def publish(self) -> Publication:
        return await self._client.call("publish", returns=Publication, deadline=self._deadline)

    async def save(self, path: Path) -> None:
        await self._client.call("save", str(path.absolute()), returns=type(None), deadline=self._deadline)

    async def load(self, path: Path) -> None:
        await self._client.call("load", str(path.absolute()), returns=type(None), deadline=self._deadline)
