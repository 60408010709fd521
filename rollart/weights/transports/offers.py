"""Transports besides HTTP, which is always available: a failure in one costs only speed.

A publisher offers the URLs of its senders, version by version; a receiver uses the first offer that works on its
machine, and HTTP for every bucket that this fails to deliver.
"""

import logging
from collections.abc import Callable, Sequence

from rollart.weights.manifest import Manifest
from rollart.weights.transports import Receiver, Sender, TransferFailed, receiver
from rollart.weights.transports.http import HttpReceiver

STRIKES = 2

log = logging.getLogger(__name__)


class SenderGroup:
    """Several senders as one. A failed one is skipped for the rest of the version. Calls `on_offer` with the URLs."""

    url = ""

    def __init__(self, senders: Sequence[Sender], on_offer: Callable[[Manifest, tuple[str, ...]], None]) -> None:
        self._senders, self._on_offer = senders, on_offer
        self._active: list[Sender] = []

    def start(self, manifest: Manifest, data: memoryview) -> None:
        self._active = list(self._senders)
        self._each(lambda sender: sender.start(manifest, data))
        self._on_offer(manifest, tuple(sender.url for sender in self._active))

    def update(self, bucket: int) -> None:
        self._each(lambda sender: sender.update(bucket))

    def finish(self) -> None:
        self._each(lambda sender: sender.finish())

    def close(self) -> None:
        for sender in self._senders:
            sender.close()

    def _each(self, do: Callable[[Sender], None]) -> None:
        for sender in list(self._active):
            try:
                do(sender)
            except TransferFailed as error:
                log.warning("this version of the weights is served by HTTP alone: %s", error)
                self._active.remove(sender)


class FallbackReceiver:
    """The first of `offers` that works here, with `plain` to fall back to. `transport` names what is in use."""

    def __init__(self, offers: Sequence[str], plain: HttpReceiver, deadline: float) -> None:
        self.transport = "http"
        self._offers, self._plain, self._deadline = offers, plain, deadline
        self.received = plain.received
        self._fast: Receiver | None = None
        self._fast_url = ""
        self._asked: set[int] = set()
        self._strikes = 0

    def start(self, manifest: Manifest, data: memoryview) -> None:
        self._plain.start(manifest, data)
        for url in self._offers:
            try:
                self._fast = receiver(url, self._deadline)
                self._fast.start(manifest, data)
                self.transport, self._fast_url = url.partition(":")[0], url
                return
            except TransferFailed as error:
                self._give_up(error)

    def update(self, bucket: int, into: memoryview) -> int | None:
        """A bucket that is requested again came wrong the first time."""
        fast = self._fast if bucket not in self._asked else None
        self._asked.add(bucket)
        if fast is not None:
            try:
                checksum = fast.update(bucket, into)
                self.received.add(self._fast_url, len(into))
                return checksum
            except TransferFailed as error:
                self._strikes += 1
                if self._strikes == STRIKES:
                    self._give_up(error)
        return self._plain.update(bucket, into)

    def finish(self) -> None:
        if self._fast is not None:
            self._fast.finish()
        self._plain.finish()

    def close(self) -> None:
        if self._fast is not None:
            self._fast.close()
        self._plain.close()

    def _give_up(self, error: TransferFailed) -> None:
        log.warning("weights come by HTTP instead: %s", error)
        self._fast, self.transport = None, "http"
