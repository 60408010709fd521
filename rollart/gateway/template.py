"""Messages with tools to tokens, by the model's own chat template.

A template that knows tools is given them. To one that does not, they are explained in the system message, and calls and
results are written out as the text that the model would have produced. Either way a conversation is opened once and
then extended: what the model generated is never rendered again.
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
        """Without control tokens, but for those that calls of tools are written with."""
        if not self._marks or self._marks.keys().isdisjoint(tokens):
            return super().text(tokens)
        pieces, begin = [], 0
        for at, token in enumerate(tokens):
            if token in self._marks:
                pieces += [super().text(tokens[begin:at]), self._marks[token]]
                begin = at + 1
        return "".join([*pieces, super().text(tokens[begin:])])

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
        """Raises ApiError for what the template refuses."""
        if not messages:
            raise invalid("there must be at least one message", "messages")
        try:
            if self._plain(messages, tools):
                return self.open(self.flat(messages, tools))
            return self._encode(self._native(messages, tools))
        except ApiError:
            raise
        except Exception as error:  # whatever a template raises, it is about these messages
            raise _refused(error) from error

    def following(self, ended: bool, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
        """What comes after an action, which `ended` by its own end of turn or not. Raises ApiError."""
        try:
            if self._plain(messages, tools):
                return self.extend("stop" if ended else "length", self.flat(messages, ()))
            _, _, after = self._native(
                [_said(FIRST_MESSAGE), ChatMessage("assistant", ACTION_MARKER), *messages], tools
            ).partition(ACTION_MARKER)
            rest = after.partition(self._end)[2]
            return self._encode(rest if ended else self._close + rest)
        except Exception as error:
            raise _refused(error) from error

    def flat(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> tuple[Message, ...]:
        """As plain messages: calls written out, tools explained at the top."""
        plain = [Message(role_of(said), self.written(said)) for said in messages]
        if tools and plain:
            explained = self.format.explain(tools)
            if plain[0].role == "system":
                plain[0] = Message("system", f"{plain[0].content}\n\n{explained}")
            else:
                plain.insert(0, Message("system", explained))
        return tuple(plain)

    def written(self, said: ChatMessage) -> str:
        calls = [self.format.write(call.name, call.arguments) for call in said.calls]
        return "\n".join([said.text, *calls] if said.text else calls)

    def _plain(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> bool:
        return not self.native or not (tools or any(said.calls for said in messages))

    def _native(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [self._message(said) for said in messages],
            tools=[described(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=True,
        )
        return text

    def _message(self, said: ChatMessage) -> dict[str, Any]:
        (harmless,) = self._escape_special([Message(role_of(said), said.text)])
        message: dict[str, Any] = {"role": harmless.role, "content": harmless.content}
        if said.calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": value(call.arguments)}}
                for call in said.calls
            ]
        if said.answers:
            message["tool_call_id"] = said.answers
        return message


def role_of(said: ChatMessage) -> str:
    return ROLES.get(said.role, said.role)


def _said(message: Message) -> ChatMessage:
    return ChatMessage(message.role, message.content)


def _refused(error: Exception) -> ApiError:
    return invalid(f"the model's chat template refuses these messages: {error}", "messages")
