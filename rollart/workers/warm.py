"""Fresh slots of one host, made ready before anybody needs them.

The invariants: at most `count` are ready, and one is on its way; a slot that is taken was never used; nothing is made
ready unless there is a host that runs; one that cannot be made ready ends, and the next is tried only after another was
taken, so a target that always fails costs one try for each.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from rollart.core.errors import RollartError
from rollart.workers.slot import Slot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Warmth:
    """How many slots of a pool are kept ready, and the call that makes one ready; none: it need only be started."""

    count: int = 0
    call: str = ""
    args: Mapping[str, object] = field(default_factory=dict)
    deadline: float = 30.0


class WarmSlots:
    """`make` starts a slot, or gives None when there is no host to start it."""

    def __init__(self, warmth: Warmth, make: Callable[[], Awaitable[Slot | None]]) -> None:
        self._warmth = warmth
        self._make = make
        self._ready: list[Slot] = []
        self._filling: asyncio.Task[None] | None = None
        self.count = 0

    def __len__(self) -> int:
        return sum(not slot.lost for slot in self._ready)

    def take(self) -> Slot | None:
        taken = None
        while self._ready and taken is None:
            slot = self._ready.pop(0)
            taken = None if slot.lost else slot
        self.fill()
        return taken

    def fill(self) -> None:
        """Begin to make ready what is missing."""
        if self.count and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(self._fill())

    async def _fill(self) -> None:
        while len(self) < self.count:
            try:
                slot = await self._make()
                if slot is None:
                    return
                await self._prepare(slot)
            except RollartError as error:
                logger.warning("a worker could not be made ready: %s", error)
                return
            self._ready = [*(ready for ready in self._ready if not ready.lost), slot]

    async def _prepare(self, slot: Slot) -> None:
        if self._warmth.call:
            try:
                await slot.call(self._warmth.call, self._warmth.args, self._warmth.deadline)
            except BaseException:
                slot.kill("it could not be made ready")
                raise

    async def drain(self) -> list[Slot]:
        """No more from now on; what was ready is the caller's to end."""
        self.count = 0
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        ready, self._ready = self._ready, []
        return ready
