"""Work that needs services: it ends when they do, with the reason that their watcher gives."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

from rollart.core.errors import ServiceError

_REASON_SECONDS = 15.0


async def supervised(watch: Any, work: Any) -> Any:
    """The result of `work`, unless `watch`, which never returns, finds first that a service that it needs is lost."""
    async with background(watch) as watching:
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await watching
            failure = working.exception()
            if failure is not None and isinstance(root_cause(failure), ServiceError):
                # A lost service shows first as a broken connection; its watcher knows why.
                await asyncio.wait([watching], timeout=_REASON_SECONDS)
                if watching.done():
                    await watching
        finally:
            working.cancel()
            await asyncio.wait([working])
        return working.result()


@contextlib.asynccontextmanager
async def background(work: Any) -> AsyncIterator[asyncio.Future[Any]]:
    """A failure of `work` is raised at the end, unless the caller was cancelled: a stopped run stays stopped."""
    task, cancelled = asyncio.ensure_future(work), False
    try:
        yield task
    except asyncio.CancelledError:
        cancelled = True
        raise
    finally:
        task.cancel()
        await asyncio.wait([task])
        failure = None if task.cancelled() else task.exception()
        if failure is not None and not cancelled:
            raise failure


def root_cause(error: BaseException) -> BaseException:
    """The first failure of a group of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does. Only the main thread may handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
