"""A vLLM server as a child process.

Invariants: it ends with this process, however this ends: the kernel signals it when its parent dies, and all its
processes are in one group, which is killed. Its output goes to our log; the last lines are kept, to say why it ended.
"""

import asyncio
import collections
import ctypes
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rollart.config import VllmConfig
from rollart.core.errors import ServiceError
from rollart.engines.vllm import command, tensor_map
from rollart.engines.vllm.api import UNIX, VllmApi
from rollart.engines.vllm.preflight import INSTALL
from rollart.launch.child import describe
from rollart.models import adapters
from rollart.models.folder import ADAPTER_CONFIG

POLL_S = 0.25
HEALTH_S = 2.0
END_S, OUTPUT_S = 5.0, 1.0
_KEPT_LINES = 200
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # of Linux
_CAUSE = re.compile(r"\b\w*(?:Error|Exception|No module named)\b.*")
_ATTENTION = re.compile(r"\.self_attn\.[qo]_proj\.weight$")
_NOISE = ("See stack trace", "See root cause", "Engine core initialization failed")


class VllmServer:
    """Made by `started`."""

    def __init__(self, process: asyncio.subprocess.Process, output: int, folder: str) -> None:
        self._process, self._folder = process, folder
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._copying = asyncio.create_task(self._copy(output))

    async def ended(self) -> str:
        """Waits for its end; returns the reason."""
        code = await self._process.wait()
        self.kill()  # processes that it left behind
        await asyncio.wait([self._copying], timeout=OUTPUT_S)
        causes = [found[0] for line in self._lines if (found := _CAUSE.search(line)) and not _noise(line)]
        why = causes[-1] if causes else " / ".join(list(self._lines)[-3:])
        return f"the vLLM server ended with {describe(code)}" + (f": {why}" if why else "")

    async def _copy(self, output: int) -> None:
        stream = asyncio.StreamReader()
        with os.fdopen(output, "rb") as pipe:
            await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
            while line := await _line(stream):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
                self._lines.append(line.decode(errors="replace").strip())

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def discard(self) -> None:
        """Kills it and removes its folder, right before this process ends."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self._process.wait()
        self.kill()
        await self._process.wait()
        self._copying.cancel()
        await asyncio.wait([self._copying])


@asynccontextmanager
async def started(spec: Mapping[str, Any]) -> AsyncIterator[tuple[VllmServer, str]]:
    """A healthy server and its address. Raises ServiceError."""
    settings = VllmConfig.model_validate(spec["vllm"])
    with tempfile.TemporaryDirectory(prefix="rollart-vllm-") as folder:
        socket = Path(folder) / "socket"
        if lora := spec.get("lora"):
            await asyncio.to_thread(_write_empty_adapter, Path(spec["model"]), Path(folder) / command.ADAPTER, lora)
        server = await spawned(command.argv(spec, socket), command.inherited() | command.environment(spec), folder)
        try:
            await _healthy(server, f"{UNIX}{socket}", settings.start_deadline)
            yield server, f"{UNIX}{socket}"
        finally:
            await server.stop()


def _write_empty_adapter(model: Path, folder: Path, lora: Mapping[str, Any]) -> None:
    """A server must have an adapter before requests can ask for it: this one adds nothing to one layer."""
    weights = (each for each in tensor_map.in_folder(model).tensors if _ATTENTION.search(each["name"]))
    if (weight := next(weights, None)) is None:
        raise ServiceError(f"{model} has no linear layer in its attention that vLLM could adapt")
    (rows, columns), rank = weight["shape"], int(lora["rank"])
    layer = weight["name"].removesuffix(".weight")
    shapes = {f"{layer}.lora_A.default.weight": (rank, columns), f"{layer}.lora_B.default.weight": (rows, rank)}
    target, alpha = layer.rpartition(".")[2], float(lora["alpha"])
    folder.mkdir()
    save_file(
        {adapters.file_name(name): torch.zeros(shape) for name, shape in shapes.items()}, folder / adapters.WEIGHTS
    )
    config = adapters.peft_config(base=str(model), rank=rank, alpha=alpha, targets=[target])
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))


async def spawned(argv: list[str], environment: Mapping[str, str], folder: str) -> VllmServer:
    # Our own pipe: with one of asyncio's, the server's children would delay the notice of the server's end.
    ours, theirs = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            cwd=folder,
            process_group=0,
            preexec_fn=_end_with_parent,
        )
    except OSError as error:
        os.close(ours)
        raise ServiceError(
            f"vLLM cannot be started: {argv[0]} cannot be executed: {error.strerror}; {INSTALL}"
        ) from error
    finally:
        os.close(theirs)
    return VllmServer(process, ours, folder)


async def _healthy(server: VllmServer, url: str, deadline: float) -> None:
    ended = asyncio.create_task(server.ended())
    try:
        async with asyncio.timeout(deadline), VllmApi(url) as api:
            while not await api.healthy(HEALTH_S):
                await asyncio.wait([ended], timeout=POLL_S)
                if ended.done():
                    why = ended.result()
                    hint = f"; {INSTALL}" if "No module named" in why else ""
                    raise ServiceError(f"{why.replace('server ended', 'server ended while it started,')}{hint}")
    except TimeoutError:
        raise ServiceError(
            f"the vLLM server was not healthy within {deadline:g} s; raise vllm.start_deadline in the run file"
        ) from None
    finally:
        ended.cancel()


async def _line(stream: asyncio.StreamReader) -> bytes:
    """A line, cut at the reader's limit."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as rest:
        return rest.partial
    except asyncio.LimitOverrunError as long:
        return await stream.read(long.consumed)


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _noise(line: str) -> bool:
    return any(words in line for words in _NOISE)
