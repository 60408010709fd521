"""A small service for the tests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rollart.launch import service
from rollart.launch.rpc import Handler, Stream


@contextlib.asynccontextmanager
async def build(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Handler]]:
    met = 0
    both = asyncio.Event()
    stopped = asyncio.Event()

    async def double(number: int) -> int:
        return 2 * number

    async def word() -> str:
        return str(spec["word"])

    async def same(data: bytes) -> bytes:
        return data

    async def fail() -> None:
        raise ValueError("not today")

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def cancelled() -> int:
        await stopped.wait()
        return 1

    async def meet() -> int:
        """Answers only once a second call has come."""
        nonlocal met
        met += 1
        number = met
        if met == 2:
            both.set()
        await both.wait()
        return number

    async def count(most: int, stream: Stream) -> int:
        for number in range(most):
            stream(number)
            await asyncio.sleep(0)
        return most

    noted: list[int] = []

    async def note(number: int) -> None:
        noted.append(number)
        if number < 0:
            raise ValueError("no caller gets this")

    async def notes() -> list[int]:
        return noted

    yield {
        "double": double,
        "word": word,
        "same": same,
        "fail": fail,
        "hang": hang,
        "cancelled": cancelled,
        "meet": meet,
        "count": count,
        "note": note,
        "notes": notes,
    }


if __name__ == "__main__":
    service.main(build)
