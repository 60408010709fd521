"""Renders messages and tools to tokens with the model's own chat template.

If the template does not support tools, they are explained in the system message, and calls and results are written as
the text that the model would have produced. Either way a conversation is rendered once and then extended: what the
model generated is never rendered again.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollart.core.action import Tool
from rollart.core.types import Message
from rollart.gateway.errors import ApiError, invalid
from rollart.gateway.messages import ChatMessage
from rollart.models.chat import ChatRenderer, with_instructions

ROLES = {"developer": "system", "function": "tool", "ipython": "tool"}


class ChatTemplate(ChatRenderer):
    def __init__(self, folder: Path, template_args: Mapping[str, Any] | None = None) -> None:
        super().__init__(folder, template_args)
        self.size = int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def first_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
        """Raises ApiError if the template refuses the messages."""
        if not messages:
            raise invalid("there must be at least one message", "messages")
        try:
            if self._plain(messages, tools):
                return self.open(self.plain_messages(messages, tools))
            return self._encode(self._apply([self._native_message(message) for message in messages], tools))
        except Exception as error:  # a template may raise anything; it is about these messages
            raise _refused(error) from error

    def next_prompt(self, last: int, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
        """The tokens that follow an action whose last token is `last`. Raises ApiError."""
        try:
            if self._plain(messages, tools):
                return self.extend(last, self.plain_messages(messages, ()))
            return self._after(last, self._after_marked([self._native_message(each) for each in messages], tools))
        except Exception as error:
            raise _refused(error) from error

    def plain_messages(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> tuple[Message, ...]:
        """Calls written as text, tools explained in the system message."""
        plain = [Message(role_of(message), self._with_calls(message)) for message in messages]
        return tuple(with_instructions(plain, self.format.explain(tools)) if tools and plain else plain)

    def _with_calls(self, message: ChatMessage) -> str:
        if not message.calls:
            return message.text
        calls = self.format.write_all([(call.name, call.arguments) for call in message.calls])
        return f"{message.text}\n{calls}" if message.text else calls

    def _plain(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> bool:
        return not self.native or not (tools or any(message.calls for message in messages))

    def _native_message(self, message: ChatMessage) -> dict[str, Any]:
        (harmless,) = self._escape_special([Message(role_of(message), message.text)])
        native: dict[str, Any] = {"role": harmless.role, "content": harmless.content}
        if message.calls:
            native["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": self.call_arguments(call.arguments)},
                }
                for call in message.calls
            ]
        if message.call_id:
            native["tool_call_id"] = message.call_id
        return native


def role_of(message: ChatMessage) -> str:
    return ROLES.get(message.role, message.role)


def _refused(error: Exception) -> ApiError:
    return invalid(f"the model's chat template refuses these messages: {error}", "messages")
