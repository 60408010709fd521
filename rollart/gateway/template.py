"""Renders messages and tools to tokens with the model's own chat template.

If the template does not support tools, they are explained in the system message, and calls and results are written as
the text that the model would have produced. Either way a conversation is rendered once and then extended: what the
model generated is never rendered again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollart.core.types import Message
from rollart.gateway.errors import ApiError, invalid
from rollart.gateway.messages import ChatMessage, Tool
from rollart.gateway.tools import described, format_of, value
from rollart.models.chat import ACTION_MARKER, FIRST_MESSAGE, ChatRenderer

ROLES = {"developer": "system", "function": "tool", "ipython": "tool"}


class ChatTemplate(ChatRenderer):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        text = str(self._tokenizer.chat_template)
        self.native = "tools" in text
        self.format = format_of(text)
        self.size = int(self._backend.get_vocab_size(with_added_tokens=True))
        self._marks = {token: mark for mark in self.format.marks if (token := self._backend.token_to_id(mark))}

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def text(self, tokens: Sequence[int]) -> str:
        """Without control tokens, except those of tool calls."""
        if not self._marks or self._marks.keys().isdisjoint(tokens):
            return super().text(tokens)
        pieces, begin = [], 0
        for at, token in enumerate(tokens):
            if token in self._marks:
                pieces += [super().text(tokens[begin:at]), self._marks[token]]
                begin = at + 1
        return "".join([*pieces, super().text(tokens[begin:])])

    def first_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
        """Raises ApiError if the template refuses the messages."""
        if not messages:
            raise invalid("there must be at least one message", "messages")
        try:
            if self._plain(messages, tools):
                return self.open(self.plain_messages(messages, tools))
            return self._encode(self._native(messages, tools))
        except Exception as error:  # a template may raise anything; it is about these messages
            raise _refused(error) from error

    def next_prompt(self, ended: bool, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
        """The tokens that follow an action; `ended`: it has its end-of-turn token. Raises ApiError."""
        try:
            if self._plain(messages, tools):
                return self.extend("stop" if ended else "length", self.plain_messages(messages, ()))
            before = [ChatMessage(FIRST_MESSAGE.role, FIRST_MESSAGE.content), ChatMessage("assistant", ACTION_MARKER)]
            _, _, after = self._native([*before, *messages], tools).partition(ACTION_MARKER)
            rest = after.partition(self._end)[2]
            return self._encode(rest if ended else self._close + rest)
        except Exception as error:
            raise _refused(error) from error

    def plain_messages(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> tuple[Message, ...]:
        """Calls written as text, tools explained in the system message."""
        plain = [Message(role_of(message), self._with_calls(message)) for message in messages]
        if tools and plain:
            explained = self.format.explain(tools)
            if plain[0].role == "system":
                plain[0] = Message("system", f"{plain[0].content}\n\n{explained}")
            else:
                plain.insert(0, Message("system", explained))
        return tuple(plain)

    def _with_calls(self, message: ChatMessage) -> str:
        calls = [self.format.write(call.name, call.arguments) for call in message.calls]
        return "\n".join([message.text, *calls] if message.text else calls)

    def _plain(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> bool:
        return not self.native or not (tools or any(message.calls for message in messages))

    def _native(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [self._native_message(message) for message in messages],
            tools=[described(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=True,
        )
        return text

    def _native_message(self, message: ChatMessage) -> dict[str, Any]:
        (harmless,) = self._escape_special([Message(role_of(message), message.text)])
        native: dict[str, Any] = {"role": harmless.role, "content": harmless.content}
        if message.calls:
            native["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": value(call.arguments)}}
                for call in message.calls
            ]
        if message.call_id:
            native["tool_call_id"] = message.call_id
        return native


def role_of(message: ChatMessage) -> str:
    return ROLES.get(message.role, message.role)


def _refused(error: Exception) -> ApiError:
    return invalid(f"the model's chat template refuses these messages: {error}", "messages")
