"""From the messages that a client sends back to the tokens that they were.

A client repeats the conversation with every request. Each answer that it got is remembered under a digest of all that
had been said up to and including it, so the longest part of a request that is known, tools included, is found by
lookups from its end. Benign changes do not count: spaces around a text, the order and spacing of arguments, ids. What
is not known was not said by this policy, or not like this, and is rendered as text.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from rollart.gateway.messages import ChatMessage, Tool
from rollart.gateway.segments import Position, Segments
from rollart.gateway.template import role_of
from rollart.gateway.tools import canonical

_encoder = msgspec.msgpack.Encoder()
TEXTS = 64  # plain prompts that are looked through
MOST = 100_000  # answers that are remembered


class History:
    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._answers: dict[bytes, Position] = {}
        self._asked: set[bytes] = set()
        self._texts: OrderedDict[str, Position] = OrderedDict()

    def find(self, messages: Sequence[ChatMessage], chain: Sequence[bytes]) -> tuple[int, Position | None]:
        """How many of the messages, whose digests are `chain`, are known, and where the last of these ends."""
        for index in range(len(messages) - 1, -1, -1):
            position = self._answers.get(chain[index]) if messages[index].role == "assistant" else None
            if position is not None and self._segments.has(position.segment):
                return index + 1, position
        return 0, None

    def asked(self, chain: Sequence[bytes]) -> bool:
        """Whether the very same was asked before."""
        again = chain[-1] in self._asked
        if len(self._asked) < MOST:
            self._asked.add(chain[-1])
        return again

    def answered(self, chain: Sequence[bytes], said: ChatMessage, position: Position) -> None:
        self._answers[_link(chain[-1], said)] = position
        if len(self._answers) > MOST:
            del self._answers[next(iter(self._answers))]

    def find_text(self, text: str) -> tuple[int, Position | None]:
        """The same for a plain prompt: how many of its characters are known."""
        known = [
            (len(said), position)
            for said, position in self._texts.items()
            if text.startswith(said) and self._segments.has(position.segment)
        ]
        return max(known, key=lambda item: item[0], default=(0, None))

    def answered_text(self, text: str, position: Position) -> None:
        self._texts[text] = position
        if len(self._texts) > TEXTS:
            self._texts.popitem(last=False)


def digests(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[bytes]:
    """One per message, each of it and of all before it."""
    digest, chain = _encoder.encode(tools) if tools else b"", []
    for said in messages:
        digest = _link(digest, said)
        chain.append(digest)
    return chain


def _link(before: bytes, said: ChatMessage) -> bytes:
    calls = [(call.name, canonical(call.arguments)) for call in said.calls]
    text = said.text.strip() if said.role == "assistant" else said.text
    return blake2b(_encoder.encode((before, role_of(said), text, calls)), digest_size=16).digest()
