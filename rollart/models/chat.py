"""Messages to tokens and back, for any model folder with a chat template; generated tokens are never rendered again.

A conversation grows by appending. What follows an action is found by rendering a conversation whose last action is a
marker and taking what comes after the marker. A template wraps a message in fixed text, the glue, so the glue of each
role is taken from the template once and a turn then costs one call of the tokenizer. If probes show that the template
does more to a message than wrap it, the template is run for every turn.

The content of a message is text: control tokens of the model in it are broken by a space, so a message can neither end
a turn nor open one.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from rollart.core.errors import RollartError
from rollart.core.types import EpisodeTurn, Finish, Message

FIRST_MESSAGE = Message("user", "x")
ACTION_MARKER = "Marker-of-an-action"
CONTENT_MARKER = "Marker-of-a-message"
MAX_CACHED = 100_000  # characters of an opening that is cached
ALWAYS_RENDERED = 8_000  # characters: rendered in a few milliseconds in any case
MAX_DENSITY = 16  # characters a token; no readable text has more
CHUNK, CHUNK_SLACK = 2000, 2  # characters, and the tokens that a cut may add
# Content that templates treat in a special way: surrounding space, no content, text that looks like markup.
PROBES = ("x", " two words \n", "\n\n# 1\n{{ x }}", "", "<tool_response>7</tool_response>", "<think>7</think> 8")


class ChatRenderer:
    """Implements `protocols.Renderer`. Loads a tokenizer, no model and no torch."""

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        if not (folder / "tokenizer.json").is_file():
            raise RollartError(f"{folder} has no tokenizer.json; save its tokenizer as a fast one with transformers")
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        if not self._tokenizer.chat_template:
            raise RollartError(f"the tokenizer in {folder} has no chat template; an instruct model is needed")
        # Called directly because the wrapper takes longer than the tokenizing.
        self._backend = self._tokenizer.backend_tokenizer
        ends = _end_ids(folder, self._tokenizer.eos_token_id)
        self._close, self._end = self._find_close(ends)
        self._close_tokens = self._encode(self._close)
        self.stop: tuple[int, ...] = tuple(sorted(ends | {self._close_tokens[-1]}))
        special = [token.content for token in self._backend.get_added_tokens_decoder().values() if token.special]
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._glues: dict[str, tuple[str, str] | None] = {}
        # Members of a group have the same opening, and so do evaluations.
        self._opening = lru_cache(maxsize=4096)(lambda messages: self._encode(self._render(messages)))

    def open(self, messages: Sequence[Message]) -> list[int]:
        messages = self._escape_special(messages)
        if sum(len(message.content) for message in messages) > MAX_CACHED:
            return self._encode(self._render(messages))
        return list(self._opening(messages))

    def extend(self, finish: Finish, messages: Sequence[Message]) -> list[int]:
        messages = self._escape_special(messages)
        glue = self._glue(messages[0].role) if len(messages) == 1 else None
        rest = glue[0] + messages[0].content + glue[1] if glue else self._after_action(messages)
        return self._encode(rest if finish == "stop" else self._close + rest)

    def may_fit(self, messages: Sequence[Message], tokens: int) -> bool:
        """Whether rendering is worth it: far too long is seen by the length, the rest is tokenized chunk by chunk.
        Some templates trim messages, so white space around them does not count."""
        text = "\n".join(message.content.strip() for message in messages)
        characters = len(text) - len(messages) + 1
        if len(messages) > tokens:
            return False
        if characters <= max(ALWAYS_RENDERED, tokens):
            return True
        if characters > tokens * min(self._longest, MAX_DENSITY):
            return False
        left = tokens
        for start in range(0, len(text), CHUNK):
            left -= len(self._encode(text[start : start + CHUNK])) - CHUNK_SLACK
            if left < 0:
                return False
        return True

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._backend.decode(tokens, skip_special_tokens=True))

    def piece(self, token: int) -> str:
        """One token, also if it is a control token."""
        return str(self._backend.decode([token], skip_special_tokens=False))

    def action(self, text: str) -> list[int]:
        """The tokens of a policy that says `text`, end of turn included."""
        return [*self._encode(self._special.sub(_break_token, text)), *self._close_tokens]

    def _escape_special(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        if not any(self._special.search(message.content) for message in messages):
            return tuple(messages)
        return tuple(Message(message.role, self._special.sub(_break_token, message.content)) for message in messages)

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return tokens

    def _render(self, messages: Sequence[Message], prompt: bool = True) -> str:
        plain = [{"role": message.role, "content": message.content} for message in messages]
        return str(self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=prompt))

    def _find_close(self, ends: set[int]) -> tuple[str, str]:
        """The text that closes an action, and the end-of-turn token that is its last part."""
        whole = self._render([FIRST_MESSAGE, Message("assistant", ACTION_MARKER)], prompt=False)
        closing = whole.partition(ACTION_MARKER)[2]
        special = {token for token in self._tokenizer.all_special_tokens if token in closing}
        known = {token for end in ends if (token := self._backend.id_to_token(end)) in closing} or special
        if not known:
            raise RollartError(
                f"the chat template of {self._tokenizer.name_or_path} ends an assistant's message with {closing!r}, "
                "which has no end-of-turn token in it; rollart needs one"
            )
        end = min(known, key=closing.index)
        return closing[: closing.index(end) + len(end)], end

    def _after_action(self, messages: Sequence[Message]) -> str:
        """What the template renders after an action's end-of-turn token when `messages` follow."""
        whole = self._render([FIRST_MESSAGE, Message("assistant", ACTION_MARKER), *messages])
        return whole.partition(ACTION_MARKER)[2].partition(self._end)[2]

    def _glue(self, role: str) -> tuple[str, str] | None:
        """The fixed text before and after a message of this role, or None if the template does more than wrap it."""
        if role not in self._glues:
            before, _, after = self._after_action([Message(role, CONTENT_MARKER)]).partition(CONTENT_MARKER)
            fixed = all(self._after_action([Message(role, probe)]) == before + probe + after for probe in PROBES)
            self._glues[role] = (before, after) if fixed else None
        return self._glues[role]


def conversation_tokens(renderer: ChatRenderer, turns: Sequence[EpisodeTurn]) -> tuple[list[int], list[int]]:
    """A conversation for training: its tokens, and a mask that is 1 on the actions and their end of turn."""
    tokens: list[int] = []
    mask: list[int] = []
    for turn in turns:
        prompt = renderer.extend("stop", turn.messages) if tokens else renderer.open(turn.messages)
        action = renderer.action(turn.action)
        tokens += prompt + action
        mask += [0] * len(prompt) + [1] * len(action)
    return tokens, mask


def _break_token(token: re.Match[str]) -> str:
    return f"{token.group()[0]} {token.group()[1:]}"


def _end_ids(folder: Path, eos: int | None) -> set[int]:
    """The tokens that end generation, from the folder's settings."""
    file = folder / "generation_config.json"
    listed = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    ends = {listed} if isinstance(listed, int) else set(listed or ())
    return ends | ({eos} if eos is not None else set())
