"""Messages to tokens and back, for any model folder with a chat template; what a model produced is never rendered again.

A conversation grows by appending. What follows an action is found by rendering a conversation whose last action is a
marker and taking what comes after the marker. A template wraps a message in fixed text ("glue"), so the glue of each
role is learnt once from the template and a turn then costs one call of the tokenizer; where a probe shows that the
template does more than wrap, it is run for every turn.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollart.errors import RollartError
from rollart.types import EpisodeTurn, Finish, Message

ACTION = "Marker of an action"
CONTENT = "Marker of a message"
# Leading and trailing space, an empty message and text that looks like code are what templates treat specially.
PROBES = ("x", " two words \n", "\n\n# 1\n{{ x }}", "", "<tool_response>\n7\n</tool_response>")


class ChatRenderer:
    """Implements `protocols.Renderer`. Not tied to torch: loading costs a tokenizer, not a model."""

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        if not (folder / "tokenizer.json").is_file():
            raise RollartError(f"{folder} has no tokenizer.json; convert its tokenizer to a fast one and save it there")
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        if not self._tokenizer.chat_template:
            raise RollartError(f"the tokenizer in {folder} has no chat template; a chat (instruct) model is needed")
        # The wrapper around it costs more than the tokenizing.
        self._backend: Any = self._tokenizer.backend_tokenizer
        self._encode = lru_cache(maxsize=16384)(self._encode_afresh)
        self._opening = lru_cache(maxsize=4096)(self._open_afresh)
        self._increment = lru_cache(maxsize=16384)(self._increment_afresh)
        ends = _end_ids(folder, self._tokenizer.eos_token_id)
        self._close, self.end = self._closing(ends)
        self.stop: tuple[int, ...] = tuple(sorted(ends | {self.end}))
        self._glue: dict[str, tuple[str, str] | None] = {}

    def open(self, messages: Sequence[Message]) -> list[int]:
        return list(self._opening(tuple(messages)))

    def extend(self, finish: Finish, messages: Sequence[Message]) -> list[int]:
        tokens = self._increment(tuple(messages))
        return list(tokens if finish == "stop" else (*self._close, *tokens))

    def text(self, tokens: Sequence[int]) -> str:
        text: str = self._backend.decode(tokens, skip_special_tokens=True)
        return text

    def action(self, text: str) -> list[int]:
        """The tokens of an action that a policy would have to make to say `text`, end of turn included."""
        return [*self._encode(text), *self._close]

    def _open_afresh(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return self._encode_afresh(self._render(messages, True))
