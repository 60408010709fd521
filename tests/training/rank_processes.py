"""The ranks of a trainer as real processes, each `python -m rollart.training.service`."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.launch import rpc
from rollart.training.client import TrainerClient

DEADLINE_S = 120.0


@dataclass
class RankProcess:
    process: asyncio.subprocess.Process
    log: Path

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            line = await self.process.stdout.readline()
        assert line, self.log.read_text()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()


async def start_rank(spec: dict[str, Any], log: Path) -> RankProcess:
    with open(log, "ab") as errors:  # noqa: ASYNC230 (opens at once)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollart.training.service"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(spec).encode() + b"\n")
    return RankProcess(process, log)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@asynccontextmanager
async def rank_processes(spec: dict[str, Any], ranks: int, logs: Path) -> AsyncIterator[list[RankProcess]]:
    """Started, perhaps not yet ready; those that still run at the end are killed."""
    address = free_address()
    started = [
        await start_rank(
            spec | {"group": {"rank": rank, "ranks": ranks, "address": address}}, logs / f"rank-{rank}-of-{ranks}.log"
        )
        for rank in range(ranks)
    ]
    try:
        yield started
    finally:
        for rank in started:
            if rank.process.returncode is None:
                rank.process.kill()
            await rank.process.wait()


@asynccontextmanager
async def spread_trainer(
    spec: dict[str, Any], ranks: int, logs: Path
) -> AsyncIterator[tuple[TrainerClient, list[RankProcess]]]:
    async with rank_processes(spec, ranks, logs) as started:
        answers = await asyncio.gather(*(rank.answer() for rank in started))
        async with rpc.connected(answers[0]["url"]) as connection:
            yield TrainerClient(connection, DEADLINE_S), started
