"""What a command wrote: its beginning and its end, however long it is. Standard library only."""

from __future__ import annotations

CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), 127)}


class Output:
    """Keeps `limit` bytes, half from the beginning and half from the end."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, piece: bytes) -> None:
        self.total += len(piece)
        room = self._half - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:]
        if len(self._tail) > 4 * self._half:
            del self._tail[: -self._half]

    def text(self) -> str:
        """Printable: what is not UTF-8 and what would steer a terminal is written as `\\xNN`."""
        left_out = self.total - len(self._head) - self._half
        if left_out <= 0:
            return _printable(self._head + self._tail)
        return (
            f"{_printable(self._head)}\n[... {left_out:,} bytes left out ...]\n{_printable(self._tail[-self._half :])}"
        )


def _printable(text: bytes | bytearray) -> str:
    return text.decode(errors="backslashreplace").translate(CONTROL)
