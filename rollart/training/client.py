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
from typing import TypeVar

from rollart.core.errors import RollartError, ServiceError, ServiceSilent
from rollart.core.types import Batch, ExampleBatch, Publication, StepMetrics
from rollart.launch.launcher import WITH_PARENT
from rollart.launch.rpc import RpcClient
from rollart.models.folder import is_adapter

T = TypeVar("T")
MANIFEST = "checkpoint.json"


class TrainerLost(ServiceError):
    """The trainer ended or hangs; its steps since the last checkpoint are lost."""


class TrainerClient:
    """Implements `rollart.core.protocols.Trainer`. Each call has `deadline` seconds. Raises ServiceError, or
    TrainerLost if there is no answer: a trainer that hangs is restarted as one that ended is."""

    def __init__(self, client: RpcClient, deadline: float) -> None:
        self._client, self._deadline = client, deadline

    async def step(self, batch: Batch) -> StepMetrics:
        return await self._call("step", batch, StepMetrics)

    async def compare(self, batch: Batch) -> dict[str, float]:
        """How well pairs are ranked; nothing is learnt."""
        return await self._call("compare", batch, dict[str, float])

    async def imitate(self, batch: ExampleBatch) -> StepMetrics:
        """A supervised step."""
        return await self._call("imitate", batch, StepMetrics)

    async def publish(self) -> Publication:
        return await self._call("publish", None, Publication)

    async def describe(self) -> dict[str, str]:
        """What it computes with: versions, devices, threads, flags."""
        return await self._call("describe", None, dict[str, str])

    async def save(self, path: Path) -> None:
        await self._call("save", str(path.absolute()), type(None))

    async def saved(self) -> str:
        return await self._call("saved", None, str)

    async def load(self, path: Path) -> None:
        await self._call("load", str(path.absolute()), type(None))

    async def export(self, checkpoint: Path, folder: Path) -> None:
        """A checkpoint as a Hugging Face folder, without a process of its own as `export_in_child` starts."""
        await self._call("export", (str(checkpoint.absolute()), str(folder.absolute())), type(None))

    async def _call(self, method: str, argument: object, returns: type[T]) -> T:
        try:
            return await self._client.call(method, argument, returns=returns, deadline=self._deadline)
        except ServiceSilent as error:
            hint = "raise training.deadline in the run file if it needs longer"
            raise TrainerLost(f"the trainer hangs: {error}; {hint}") from error


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


async def export_in_child(checkpoint: Path, folder: Path) -> None:
    """Write the policy of a checkpoint, or an adapter with its base, as a Hugging Face folder. Cancelling kills the
    child. Raises RollartError."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, *WITH_PARENT, "rollart.training.export", str(checkpoint), str(folder)),
        stdin=PIPE,
        stderr=PIPE,
        start_new_session=True,
    )
    try:
        assert child.stderr is not None
        errors = await child.stderr.read()
        await child.wait()
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
    """A Hugging Face folder: `path` itself or, if that is a checkpoint or an adapter, an export that is deleted
    afterwards."""
    if not is_checkpoint(path) and not is_adapter(path):
        yield path
        return
    with TemporaryDirectory(prefix=".export-", dir=path.absolute().parent) as made:
        folder = Path(made) / path.name
        await export_in_child(path, folder)
        yield folder
