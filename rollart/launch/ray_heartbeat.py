"""Whether the actors on a node of a Ray cluster still reply: one call at a time for all of a node.

Invariants:
- A node is asked every `BEAT_S`, whatever runs there: each time another of its actors. So what a controller has to do
  grows with its nodes, not with its services.
- An actor must reply within `SILENT_S`. If it does not, the others are asked too: the node is lost if none of them
  replies, else that actor alone. If Ray's port of the node, which was open before, is closed, the node is lost at once.
- An actor that Ray reports as dead is no news of its node: whoever waits for it is informed by Ray.
- Nothing here blocks the event loop, and no Ray call is cancelled: Ray's client does not support it.
"""

import asyncio
from typing import Any

from ray.exceptions import RayError

BEAT_S, LATE_S, SILENT_S = 2.0, 1.0, 8.0
RECONNECT_S = 2.0


class NodeHeartbeat:
    """Of the node at this address, where Ray listens on `port`. Begins with the first actor and ends with the last."""

    def __init__(self, address: str, port: int) -> None:
        self._address, self._port = address, port
        self._reachable = False  # a firewall may block the port
        self._lost: dict[Any, asyncio.Future[str]] = {}  # by actor
        self._beating: asyncio.Task[None] | None = None

    def join(self, actor: Any) -> asyncio.Future[str]:
        """Done once the actor is lost, with the reason."""
        self._lost[actor] = asyncio.get_running_loop().create_future()
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat())
        return self._lost[actor]

    def leave(self, actor: Any) -> None:
        self._lost.pop(actor, None)

    async def port_closed(self) -> bool:
        """Whether Ray's port, which was reachable before, is closed now."""
        return self._reachable and await _is_listening(self._address, self._port) is False

    async def _beat(self) -> None:
        self._reachable = bool(await _is_listening(self._address, self._port))
        while self._lost:
            await asyncio.sleep(BEAT_S)
            if not self._lost:
                return
            actor = next(iter(self._lost))
            self._lost[actor] = self._lost.pop(actor)  # the last to be asked next time
            if await self._is_silent(actor):
                alive = not await self.port_closed() and await self._others_reply(actor)
                for each, lost in self._lost.items():
                    if not lost.done() and (each is actor or not alive):
                        lost.set_result("it does not reply")

    async def _is_silent(self, actor: Any) -> bool:
        clock = asyncio.get_running_loop().time
        began, call = clock(), ray_future(actor.ping.remote())
        done, _ = await asyncio.wait({call}, timeout=LATE_S)
        while not done:
            if clock() - began > SILENT_S or await self.port_closed():
                return True
            done, _ = await asyncio.wait({call}, timeout=LATE_S)
        return False

    async def _others_reply(self, actor: Any) -> bool:
        others = [other for other in self._lost if other is not actor]
        return any(await asyncio.gather(*map(replies, others)))


async def replies(actor: Any) -> bool:
    try:
        await answer(actor.ping.remote(), RECONNECT_S)
    except (RayError, TimeoutError):
        return False
    return True


async def answer(call: Any, deadline: float) -> Any:
    """The result of a Ray call. Raises TimeoutError, or what the call raised."""
    future = ray_future(call)
    done, _ = await asyncio.wait({future}, timeout=deadline)
    if not done:
        raise TimeoutError
    return future.result()


def ray_future(call: Any) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.wrap_future(call.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, even if unused
    return future


async def _is_listening(address: str, port: int) -> bool | None:
    """Whether the port accepts connections; None after a timeout."""
    try:
        async with asyncio.timeout(LATE_S):
            _, writer = await asyncio.open_connection(address, port)
    except TimeoutError:
        return None
    except OSError:
        return False
    writer.close()
    return True
