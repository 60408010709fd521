"""Messages to tokens and back, for any model folder with a chat template; generated tokens are never rendered again.

A conversation grows by appending. What follows an action is found by rendering a conversation whose last action is a
marker and taking what comes after the marker. A template wraps a message in fixed text, the glue, so the glue of each
role is taken from the template once and a turn then costs one call of the tokenizer. If probes show that the template
does more to a message than wrap it, the template is run for every turn.

Most templates end an action with a token of its own. In some (GLM) the header of the next message ends it: the model
samples that header, and it is not rendered again.

The content of a message is text: control tokens of the model in it are broken by a space, so a message can neither end
a turn nor open one. Tools are declared in a first message of the role `tools` (`core/action.py`).
"""

import json
import os
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollart.core.action import TOOLS_ROLE, ParsedAction, Tool
from rollart.core.errors import RollartError
from rollart.core.types import EpisodeTurn, Message
from rollart.models.tool_calls import Tagged, described, format_of, value

FIRST_MESSAGE = Message("user", "x")
ACTION_MARKER = "Marker-of-an-action"
CALL_MARKER = "Marker-of-a-call"
CONTENT_MARKER = "Marker-of-a-message"
CALL_ID = "call00000"  # of nine letters and digits, as some templates demand
LONG_OPENING = 100_000  # characters; of longer ones only those of the groups under way are kept
SHORT_CACHED, LONG_CACHED = 4096, 64  # openings
ALWAYS_RENDERED = 8_000  # characters: rendered in a few milliseconds in any case
MAX_DENSITY = 16  # characters a token; no readable text has more
CHUNK, CHUNK_SLACK = 2000, 2  # characters, and the tokens that a cut may add
PROMPT_END = 16  # tokens of a prompt in which its last header is found
# Content that templates treat in a special way: surrounding space, no content, text that looks like markup.
PROBES = ("x", " two words \n", "\n\n# 1\n{{ x }}", "", "<tool_response>7</tool_response>", "<think>7</think> 8")
REASONING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
CANONICAL = Tagged()
_TOOLS = msgspec.json.Decoder(tuple[Tool, ...])


class ChatRenderer:
    """Implements `protocols.Renderer`. Loads a tokenizer, no model and no torch. `template_args` are variables for the
    chat template."""

    def __init__(self, folder: Path, template_args: Mapping[str, Any] | None = None) -> None:
        from transformers import PreTrainedTokenizerFast

        # One text at a time: its threads would only hand it over, for a third of the time.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if not (folder / "tokenizer.json").is_file():
            raise RollartError(f"{folder} has no tokenizer.json; save its tokenizer as a fast one with transformers")
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        if not self._tokenizer.chat_template:
            raise RollartError(f"the tokenizer in {folder} has no chat template; an instruct model is needed")
        template = str(self._tokenizer.chat_template)
        self._args = _known_args(template_args or {}, template, folder)
        self.native = "tools" in template
        self.format = format_of(template)
        self.reasoning = next((ReasoningTags(*tags) for tags in REASONING_TAGS if tags[1] in template), None)
        # Called directly because the wrapper takes longer than the tokenizing.
        self._backend = self._tokenizer.backend_tokenizer
        marks = (*self.format.marks, *(self.reasoning or ()))
        self._marks = {token: mark for mark in marks if (token := self._backend.token_to_id(mark)) is not None}
        ends = _end_ids(folder, self._tokenizer.eos_token_id)
        self._close, self._end = self._find_close(ends)
        self._close_tokens = self._encode(self._close)
        self.stop: tuple[int, ...] = tuple(sorted(ends | {self._close_tokens[-1]}))
        special = [token.content for token in self._backend.get_added_tokens_decoder().values() if token.special]
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._glues: dict[str, tuple[str, str] | None] = {}
        # Members of a group have the same opening, and so do evaluations.
        self._opening = lru_cache(SHORT_CACHED)(lambda messages: self._encode(self._render(messages)))
        self._long_opening = lru_cache(LONG_CACHED)(lambda messages: array("I", self._encode(self._render(messages))))
        self._fits = lru_cache(LONG_CACHED)(self._fits_in_chunks)

    def open(self, messages: Sequence[Message]) -> list[int]:
        messages = self._escape_special(messages)
        long = sum(len(message.content) for message in messages) > LONG_OPENING
        return list(self._long_opening(messages) if long else self._opening(messages))

    def extend(self, last: int, messages: Sequence[Message]) -> list[int]:
        messages = self._escape_special(messages)
        glue = self._glue(messages[0].role) if len(messages) == 1 else None
        return self._after(last, glue[0] + messages[0].content + glue[1] if glue else self._after_action(messages))

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
        return self._fits(text, tokens)

    def _fits_in_chunks(self, text: str, tokens: int) -> bool:
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

    def read(self, prompt: Sequence[int], tokens: Sequence[int], opening: Sequence[Message]) -> ParsedAction:
        text, split = self.text(tokens), self.splitter(prompt)
        reasoning, start = split(text) if split is not None else ("", 0)
        text = text[start:]
        if tools := declared_tools(opening):
            text, calls = self.format.read(text, tools)
            if calls:
                text = "\n".join([*([text] if text else []), CANONICAL.write_all(calls)])
        return ParsedAction(text, reasoning)

    def thinks(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside of the reasoning."""
        if self.reasoning is None:
            return False
        end = str(self._backend.decode(prompt[-PROMPT_END:], skip_special_tokens=False))
        return end.rfind(self.reasoning.begin) > end.rfind(self.reasoning.end)

    def splitter(self, prompt: Sequence[int]) -> Callable[[str], tuple[str, int]] | None:
        """Splits texts that follow this prompt: see `ReasoningTags.split`."""
        tags, inside = self.reasoning, self.thinks(prompt)
        return None if tags is None else lambda text: tags.split(text, inside)

    def text(self, tokens: Sequence[int]) -> str:
        """Without control tokens, except those of tool calls and reasoning."""
        if not self._marks or self._marks.keys().isdisjoint(tokens):
            return str(self._backend.decode(tokens, skip_special_tokens=True))
        pieces, begin = [], 0
        for at, token in enumerate(tokens):
            if token in self._marks:
                pieces += [self._backend.decode(tokens[begin:at], skip_special_tokens=True), self._marks[token]]
                begin = at + 1
        return "".join([*pieces, self._backend.decode(tokens[begin:], skip_special_tokens=True)])

    def piece(self, token: int) -> str:
        """One token, also if it is a control token."""
        return str(self._backend.decode([token], skip_special_tokens=False))

    def action(self, text: str, opening: Sequence[Message] = ()) -> list[int]:
        """The tokens of a policy that says `text`, end of turn included. Calls are written in the model's format."""
        calls: list[tuple[str, str]] = []
        if tools := declared_tools(opening):
            text, calls = CANONICAL.read(text, tools)
        text = self._special.sub(_break_token, text)
        if calls:
            harmless = [(name, self._special.sub(_break_token, given)) for name, given in calls]
            text = "\n".join([*([text] if text else []), self.format.write_all(harmless)])
        return [*self._encode(text), *self._close_tokens]

    def _after(self, last: int, rest: str) -> list[int]:
        """`rest` follows an action whose last token is `last`: its end of turn is added if it is missing."""
        ended = last in self.stop
        if self._end:
            return self._encode(rest if ended else self._close + rest)
        tokens = self._encode(rest)
        return tokens[1:] if ended and tokens[:1] == [last] else tokens

    def _escape_special(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        if not any(self._special.search(message.content) for message in messages):
            return tuple(messages)
        return tuple(Message(message.role, self._special.sub(_break_token, message.content)) for message in messages)

    def _encode(self, text: str) -> list[int]:
        # Half the time of `encode`, which also computes where in the text each token is.
        tokens: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return tokens

    def _render(self, messages: Sequence[Message]) -> str:
        tools = declared_tools(messages)
        if not tools or self.native:
            return self._apply(self._dicts(messages[1:] if tools else messages), tools)
        return self._apply(self._dicts(with_instructions(messages[1:], self.format.explain(tools))))

    def _apply(self, messages: list[dict[str, Any]], tools: Sequence[Tool] = (), prompt: bool = True) -> str:
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=[described(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=prompt,
            **self._args,
        )
        return str(text)

    def _dicts(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """As the template takes them: a role that it does not know becomes part of a user's message."""
        made: list[dict[str, Any]] = []
        folded = ""
        for message in messages:
            role, content = message.role, message.content
            if role == "system" and not self._knows_system:
                folded += f"{content}\n\n"
                continue
            if role == "tool" and self._caller is None:
                folded += f"<tool_response>\n{content}\n</tool_response>\n"
                continue
            if folded and role == "user":
                content, folded = folded + content, ""
            named = {"tool_call_id": CALL_ID} if role == "tool" else {}
            made.append({"role": role, "content": content, **named})
        return [*made, {"role": "user", "content": folded.rstrip()}] if folded else made

    @cached_property
    def _knows_system(self) -> bool:
        asked = [{"role": "system", "content": CONTENT_MARKER}, _dict(FIRST_MESSAGE)]
        return CONTENT_MARKER in self._try(asked)

    @cached_property
    def _caller(self) -> tuple[dict[str, Any], str] | None:
        """The action before a tool's result, as this template takes it, and its marker; None if it takes no results."""
        result = {"role": "tool", "content": CONTENT_MARKER, "tool_call_id": CALL_ID}
        taken: tuple[object, ...] = ({}, "{}")
        for arguments in taken:
            function = {"name": CALL_MARKER, "arguments": arguments}
            calls = [{"type": "function", "id": CALL_ID, "function": function}]
            action = {"role": "assistant", "content": "", "tool_calls": calls}
            if CONTENT_MARKER in self._try([_dict(FIRST_MESSAGE), action, result]).partition(CALL_MARKER)[2]:
                return action, CALL_MARKER
        plain = {"role": "assistant", "content": ACTION_MARKER}
        known = CONTENT_MARKER in self._try([_dict(FIRST_MESSAGE), plain, result])
        return (plain, ACTION_MARKER) if known else None

    def call_arguments(self, arguments: str) -> Any:
        """As this template takes them: text, or what the JSON says."""
        taken = self._caller[0].get("tool_calls") if self._caller is not None else None
        return arguments if taken and isinstance(taken[0]["function"]["arguments"], str) else value(arguments)

    def _try(self, messages: list[dict[str, Any]]) -> str:
        """Rendered, or empty if the template refuses."""
        try:
            return self._apply(messages)
        except Exception:  # a template may raise anything
            return ""

    def _find_close(self, ends: set[int]) -> tuple[str, str]:
        """The text that closes an action, and the end-of-turn token that is its last part; the latter is empty if the
        header of the next message ends it."""
        conversation = [_dict(FIRST_MESSAGE), {"role": "assistant", "content": ACTION_MARKER}]
        closing = self._apply(conversation, prompt=False).partition(ACTION_MARKER)[2]
        special = {token for token in self._tokenizer.all_special_tokens if token in closing}
        known = {token for end in ends if (token := self._backend.id_to_token(end)) in closing} or special
        if known:
            end = min(known, key=closing.index)
            return closing[: closing.index(end) + len(end)], end
        followed = self._try([*conversation, _dict(FIRST_MESSAGE)]).partition(ACTION_MARKER)[2]
        headers = [token for end in ends if followed.startswith(token := str(self._backend.id_to_token(end)))]
        if not headers:
            raise RollartError(
                f"the chat template of {self._tokenizer.name_or_path} ends an assistant's message with {closing!r}, "
                "which has no end-of-turn token in it; rollart needs one"
            )
        return headers[0], ""

    def _after_action(self, messages: Sequence[Message]) -> str:
        """What the template renders after an action's end-of-turn token when `messages` follow."""
        return self._after_marked(self._dicts(messages))

    def _after_marked(self, messages: list[dict[str, Any]], tools: Sequence[Tool] = ()) -> str:
        action, marker = {"role": "assistant", "content": ACTION_MARKER}, ACTION_MARKER
        if messages and messages[0]["role"] == "tool" and self._caller is not None:
            action, marker = self._caller
        after = self._apply([_dict(FIRST_MESSAGE), action, *messages], tools).partition(marker)[2]
        if self._end:
            return after.partition(self._end)[2]
        headers = [str(self._backend.id_to_token(token)) for token in self.stop]
        return after[min((at for header in headers if (at := after.find(header)) >= 0), default=0) :]

    def _glue(self, role: str) -> tuple[str, str] | None:
        """The fixed text before and after a message of this role, or None if the template does more than wrap it."""
        if role not in self._glues:
            before, _, after = self._after_action([Message(role, CONTENT_MARKER)]).partition(CONTENT_MARKER)
            fixed = all(self._after_action([Message(role, probe)]) == before + probe + after for probe in PROBES)
            self._glues[role] = (before, after) if fixed else None
        return self._glues[role]


class ReasoningTags(NamedTuple):
    """What a model writes around its reasoning."""

    begin: str
    end: str

    def split(self, text: str, inside: bool) -> tuple[str, int]:
        """The reasoning, and where in the text the answer begins: at its end while there is none yet. `inside`: the
        prompt began the reasoning."""
        stripped = text.lstrip()
        if stripped.startswith(self.begin):
            stripped = stripped[len(self.begin) :]
        elif not inside:
            return "", len(text) if text and self.begin.startswith(stripped) else 0
        reasoning, end, answer = stripped.partition(self.end)
        return reasoning.strip(), len(text) - len(answer.lstrip()) if end else len(text)


def conversation_tokens(renderer: ChatRenderer, turns: Sequence[EpisodeTurn]) -> tuple[list[int], list[int]]:
    """A conversation for training: its tokens, and a mask that is 1 on the actions and their end of turn."""
    tokens: list[int] = []
    mask: list[int] = []
    for turn in turns:
        prompt = renderer.extend(tokens[-1], turn.messages) if tokens else renderer.open(turn.messages)
        action = renderer.action(turn.action, turns[0].messages)
        tokens += prompt + action
        mask += [0] * len(prompt) + [1] * len(action)
    return tokens, mask


def declared_tools(opening: Sequence[Message]) -> tuple[Tool, ...]:
    """Of a conversation that begins like this."""
    return _parsed_tools(opening[0].content) if opening and opening[0].role == TOOLS_ROLE else ()


@lru_cache(maxsize=256)
def _parsed_tools(content: str) -> tuple[Tool, ...]:
    return _TOOLS.decode(content)


def with_instructions(messages: Sequence[Message], text: str) -> list[Message]:
    """`text` at the end of the system message, which is added if there is none."""
    if messages and messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]


def _known_args(args: Mapping[str, Any], template: str, folder: Path) -> dict[str, Any]:
    """Raises RollartError for variables that the template does not use: they would be ignored."""
    known = dict(args)
    if "enable_thinking" in known and "enable_thinking" not in template and re.search(r"\bthinking\b", template):
        known["thinking"] = known.pop("enable_thinking")
    unused = [name for name in known if not re.search(rf"\b{re.escape(name)}\b", template)]
    if unused:
        raise RollartError(
            f"the chat template of {folder} does not use {unused[0]!r}: take it out of the run file's model section"
        )
    return known


def _dict(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.content}


def _break_token(token: re.Match[str]) -> str:
    return f"{token.group()[0]} {token.group()[1:]}"


def _end_ids(folder: Path, eos: int | None) -> set[int]:
    """The tokens that end generation, from the folder's settings."""
    file = folder / "generation_config.json"
    listed = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    ends = {listed} if isinstance(listed, int) else set(listed or ())
    return ends | ({eos} if eos is not None else set())
