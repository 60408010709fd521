"""Where the KV of a sequence's beginning is already, so that it is copied and not computed."""

from collections.abc import Sequence as Many
from dataclasses import dataclass

from rollart.engines.torch.kv_cache import Entry, ParkedKV, Part
from rollart.engines.torch.kv_rows import Rows
from rollart.engines.torch.prefix_cache import BLOCK, PrefixIndex, common_prefix
from rollart.engines.torch.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Found:
    """The KV of the first `own` tokens is in `entry`, or in the row of `holder`; that of those until `length` is in
    `part`, which came from another engine."""

    entry: Entry | None
    holder: Sequence | None
    own: int
    part: Part | None
    length: int

    def copy(self, row: int, rows: Rows, running: Many[Sequence]) -> None:
        if self.entry is not None:
            rows.write(row, 0, self.entry.kv[:, :, : self.own])
        elif self.holder is not None and self.own:
            rows.copy(running.index(self.holder), row, self.own)
        if self.part is not None and self.length > self.own:
            start = self.part.start
            rows.write(row, self.own, self.part.kv[:, :, self.own - start : self.length - start])


def find(sequence: Sequence, parked: ParkedKV, live: PrefixIndex[Sequence]) -> Found | None:
    """None: wait, another sequence, of those in `live`, is about to have more of it.

    At least one token is left to compute, because the next one is sampled from its logits.
    """
    most = len(sequence.tokens) - 1
    entry, own, _ = parked.find(sequence.session, sequence.tokens, sequence.blocks)
    own, promised = min(own, most), 0
    holder = live.longest(sequence.blocks)
    if holder is not None:
        promised = min(common_prefix(holder.tokens, sequence.tokens), most)
        ready = min(promised, holder.computed)
        if ready > own:
            entry, own = None, ready
    part, length = parked.part(sequence.id), own
    if part is not None and part.start <= own:
        length = max(min(part.stop, most), own)
    if promised - length >= BLOCK:
        return None
    return Found(entry, None if entry is not None else holder, own, part, length)
