"""Deltas between hosts: the request for a bucket names the base that the receiver has and the measured speed of the
link; the server sends the delta where that is predicted to be faster.

Invariants: a base is named by the id of its publication, and both sides hold it while they use it. The checksum of the
bucket decides in any case: a delta that does not match is refused, and the bucket is requested plain. A version without
a base (the first, and one of every `ANCHOR_EVERY`) is always sent in full.
"""

import threading
from collections import OrderedDict

from rollart.weights.delta import Link, encode, measured_codec
from rollart.weights.manifest import ITEM_BYTES, Manifest
from rollart.weights.store import MissingVersion, Shard, Store

BASE, SPEED, ENCODING = "X-Base", "X-Link", "X-Encoding"
DELTA = "delta"
KEPT = 4
MIN_MEASURED = 4 << 20  # bytes; fewer measure buffers, not the link
FAST_LINK = 1e9  # bytes per second; no codec is faster, so nothing is requested or measured


class LinkSpeeds:
    """Moving average of the speed of a stream, by the address of its source."""

    def __init__(self) -> None:
        self._speeds: dict[str, float] = {}

    def record(self, source: str, size: int, seconds: float) -> None:
        if size >= MIN_MEASURED and seconds > 0:
            old = self._speeds.get(source, size / seconds)
            self._speeds[source] = 0.5 * old + 0.5 * size / seconds

    def of(self, source: str) -> float | None:
        return self._speeds.get(source)


speeds = LinkSpeeds()  # of this process: receivers come and go, links stay


def delta_request(base: Shard, source: str, streams: int) -> dict[str, str]:
    """The headers that request a delta; none for a link that is too fast or not yet measured. The link carries
    `streams` at once, but one core may have to encode them all."""
    speed = (speeds.of(source) or FAST_LINK) * streams
    return {BASE: base.manifest.id, SPEED: f"{speed:.0f}"} if speed < FAST_LINK else {}


class DeltaCache:
    """Deltas of shards in `store`. The last `KEPT` are cached: several receivers may request the same."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._made: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def answer(self, shard: Shard, start: int, stop: int, base: str | None, bytes_per_s: int) -> bytes | None:
        """For a receiver that has `base`, over a link of that speed. None: send the plain bytes."""
        manifest = shard.manifest
        bucket = start // manifest.bucket_bytes
        if base is None or base != manifest.base or bytes_per_s <= 0 or (start, stop) != manifest.bounds(bucket):
            return None
        key = manifest.id, manifest.shard, bucket
        with self._lock:
            if key in self._made:
                return self._made[key]
        made = self._make(shard, start, stop, bytes_per_s)
        if made is not None:
            with self._lock:
                self._made[key] = made
                while len(self._made) > KEPT:
                    self._made.popitem(last=False)
        return made

    def _make(self, shard: Shard, start: int, stop: int, bytes_per_s: int) -> bytes | None:
        base = base_of(self._store, shard.manifest)
        if base is None:
            return None
        try:
            old, new = base.data[start:stop], shard.data[start:stop]
            item = most_common_item(shard.manifest, start, stop)
            return encode(old, new, item) if Link(bytes_per_s, measured_codec()).pays(old, new, item) else None
        finally:
            base.release()


def base_of(store: Store, manifest: Manifest) -> Shard | None:
    """The base of a version; None if it has none, or it is not complete in the store."""
    for version, id, number in store.shards():
        if (id, number) != (manifest.base, manifest.shard):
            continue
        try:
            shard = store.open(version, id, number)
        except MissingVersion:
            return None
        if shard.ready == manifest.buckets and manifest.same_layout(shard.manifest):
            return shard
        shard.release()
    return None


def most_common_item(manifest: Manifest, start: int, stop: int) -> int:
    """The size of most elements in this range."""
    covered: dict[int, int] = {1: 0}
    for piece in manifest.pieces:
        inside = min(stop, piece.end) - max(start, piece.offset)
        if inside > 0:
            item = ITEM_BYTES[piece.part.dtype]
            covered[item] = covered.get(item, 0) + inside
    return max(covered, key=lambda item: covered[item])
