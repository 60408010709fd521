"""The trainer as the control plane sees it: a client of its service, and its checkpoints as folders. No torch."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from rollart.core.errors import RollartError
from rollart.core.types import Batch, ExampleBatch, Publication, StepMetrics
from rollart.launch.rpc import RpcClient

MANIFEST = "checkpoint.json"


class TrainerClient:
    """Implements `rollart.core.protocols.Trainer`. Each call has `deadline` seconds; a failure is a ServiceError."""

    def __init__(self, client: RpcClient, deadline: float) -> None:
        self._client, self._deadline = client, deadline

    async def step(self, batch: Batch) -> StepMetrics:
        return await self._client.call("step", batch, returns=StepMetrics, deadline=self._deadline)

    async def imitate(self, batch: ExampleBatch) -> StepMetrics:
        """A supervised step."""
        return await self._client.call("imitate", batch, returns=StepMetrics, deadline=self._deadline)

    async def publish(self) -> Publication:
        return await self._client.call("publish", returns=Publication, deadline=self._deadline)

    async def save(self, path: Path) -> None:
        await self._client.call("save", str(path.absolute()), returns=type(None), deadline=self._deadline)

    async def saved(self) -> str:
        return await self._client.call("saved", returns=str, deadline=self._deadline)

    async def load(self, path: Path) -> None:
        await self._client.call("load", str(path.absolute()), returns=type(None), deadline=self._deadline)


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


async def export_in_child(checkpoint: Path, folder: Path) -> None:
    """Write the policy of a checkpoint as a Hugging Face folder. Cancelling kills the child. Raises RollartError."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollart.training.export", str(checkpoint), str(folder)),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=PIPE,
        start_new_session=True,
    )
    try:
        _, errors = await child.communicate()
    finally:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
    if child.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise RollartError(last[0] if last else f"exporting {checkpoint} ended with exit code {child.returncode}")


@asynccontextmanager
async def model_folder(path: Path) -> AsyncIterator[Path]:
    """A Hugging Face folder: `path` itself or, if that is a checkpoint, an export that is deleted afterwards."""
    if not is_checkpoint(path):
        yield path
        return
    with TemporaryDirectory(prefix=".export-", dir=path.absolute().parent) as made:
        folder = Path(made) / path.name
        await export_in_child(path, folder)
        yield folder
