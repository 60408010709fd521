"""Which experts of a mixture an engine used for each token: compact, so that it can travel with every completion.

A row is one token: for each decoder layer, the ids of the experts that its gate chose. A layer without experts has a
place too. The trainer can use the same experts instead of choosing again (replay).
"""

from collections.abc import Iterable

from msgspec import Struct


class ChoiceShape(Struct, frozen=True, gc=False):
    """`choices` ids of `width` bytes, little-endian, for each of `layers`. An id with all bits set is not known."""

    layers: int
    choices: int
    width: int

    @classmethod
    def of(cls, layers: int, choices: int, experts: int) -> "ChoiceShape":
        return cls(layers, choices, 1 if experts < 256 else 2)

    @property
    def row(self) -> int:
        return self.layers * self.choices * self.width

    def unknown(self, rows: int) -> bytes:
        return b"\xff" * (rows * self.row)


class ExpertChoices(Struct, frozen=True, gc=False):
    """The rows of a context from token `start` on."""

    start: int
    shape: ChoiceShape
    data: bytes

    @property
    def stop(self) -> int:
        return self.start + len(self.data) // self.shape.row

    def cut(self, stop: int) -> "ExpertChoices":
        """Without the rows from token `stop` on."""
        return ExpertChoices(self.start, self.shape, self.data[: max(0, stop - self.start) * self.shape.row])


def join(parts: Iterable[ExpertChoices | None], tokens: int) -> ExpertChoices | None:
    """One row for each of `tokens`, from the completions of a conversation, in their order. Of several rows for a token
    the first counts: it was there when the token was sampled. None if there are no rows.

    >>> shape = ChoiceShape(1, 1, 1)
    >>> join([ExpertChoices(1, shape, b"ab"), None, ExpertChoices(2, shape, b"xyz")], 6).data
    b'\\xffabyz\\xff'
    """
    found = [part for part in parts if part is not None]
    if not found:
        return None
    shape, data = found[0].shape, b""
    for part in found:
        if part.shape != shape:
            raise ValueError(f"engines of one conversation chose experts in the shapes {shape} and {part.shape}")
        have = len(data) // shape.row
        data += shape.unknown(part.start - have) + part.data[max(0, have - part.start) * shape.row :]
    data = data[: tokens * shape.row]
    return ExpertChoices(0, shape, data + shape.unknown(tokens - len(data) // shape.row))
