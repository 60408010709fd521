"""The gateway through the real `anthropic` package."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import pytest
from gateways import KEY, Policy, Running, gateway

from rollart.gateway.template import ChatTemplate

ASK: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [{"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}]
CALL = 'So.<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def with_client(
    template: ChatTemplate,
    test: Callable[[anthropic.AsyncAnthropic, Running], Awaitable[None]],
    says: str | None = None,
) -> None:
    async def run() -> None:
        policy = Policy(template, say=lambda request: says)
        async with (
            gateway(template, policy) as running,
            anthropic.AsyncAnthropic(base_url=running.url, api_key=KEY, max_retries=0, timeout=20) as client,
        ):
            await test(client, running)

    asyncio.run(run())


def test_a_message_has_text_a_reason_and_usage(tiny: ChatTemplate) -> None:
    async def test(client: anthropic.AsyncAnthropic, running: Running) -> None:
        answer = await client.messages.create(model="claude", max_tokens=50, system="be kind", messages=ASK)
        assert answer.content[0].type == "text" and answer.content[0].text == "fine"
        assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 5)
        assert answer.usage.input_tokens == len(running.policy.seen[0][0].tokens)
        counted = await client.messages.count_tokens(model="claude", system="be kind", messages=ASK)
        assert counted.input_tokens == answer.usage.input_tokens

    with_client(tiny, test, "fine")


def test_the_first_text_is_there_before_the_answer_is_complete(tiny: ChatTemplate) -> None:
    async def test(client: anthropic.AsyncAnthropic, running: Running) -> None:
        pause = running.policy.pause = asyncio.Event()
        async with client.messages.stream(model="claude", max_tokens=50, messages=ASK) as stream:
            assert await anext(aiter(stream.text_stream)) == "s"
            assert not running.policy.seen
            pause.set()
            assert await stream.get_final_text() == "slowly"
            message = await stream.get_final_message()
        assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 7)

    with_client(tiny, test, "slowly")


def test_a_format_that_cannot_be_enforced_is_a_bad_request(tiny: ChatTemplate) -> None:
    async def test(client: anthropic.AsyncAnthropic, running: Running) -> None:
        schema: Any = {"format": {"type": "json_schema", "schema": {}}}
        with pytest.raises(anthropic.BadRequestError, match="only text"):
            await client.messages.create(
                model="claude", max_tokens=9, messages=ASK, extra_body={"output_config": schema}
            )

    with_client(tiny, test, "fine")


def test_a_streamed_tool_call_and_its_result_stay_in_one_segment(tiny: ChatTemplate) -> None:
    async def test(client: anthropic.AsyncAnthropic, running: Running) -> None:
        async with client.messages.stream(model="claude", max_tokens=99, messages=ASK, tools=TOOLS) as stream:
            answer = await stream.get_final_message()
        text, call = answer.content
        assert text.type == "text" and text.text == "So."
        assert call.type == "tool_use" and (call.name, call.input) == ("add", {"a": 2})
        assert answer.stop_reason == "tool_use"
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "5"}]}
        more: Any = [
            *ASK,
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        ]
        await client.messages.create(model="claude", max_tokens=99, messages=more, tools=TOOLS)
        captured = running.sessions.close(KEY)
        assert [turn.segment for turn in captured.turns] == [0, 0]
        assert [message.role for message in captured.turns[1].messages] == ["tool", "user"]

    with_client(tiny, test, CALL)


def test_a_stop_sequence_is_named(tiny: ChatTemplate) -> None:
    async def test(client: anthropic.AsyncAnthropic, running: Running) -> None:
        answer = await client.messages.create(model="claude", max_tokens=50, messages=ASK, stop_sequences=["END"])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
        assert answer.content[0].type == "text" and answer.content[0].text == "this is the "

    with_client(tiny, test, "this is the END of it")


def test_the_model_continues_a_prefilled_response(tiny: ChatTemplate) -> None:
    async def test(client: anthropic.AsyncAnthropic, running: Running) -> None:
        begun: Any = [*ASK, {"role": "assistant", "content": "I thi"}]
        answer = await client.messages.create(model="claude", max_tokens=50, messages=begun)
        assert answer.content[0].type == "text" and answer.content[0].text == "nk so"
        assert tiny.text(running.policy.seen[0][0].tokens).endswith("I thi")
        more: Any = [*ASK, {"role": "assistant", "content": "I think so"}, *ASK]
        await client.messages.create(model="claude", max_tokens=50, messages=more)
        assert [turn.segment for turn in running.sessions.close(KEY).turns] == [0, 0]

    with_client(tiny, test, "nk so")


def test_errors_are_those_of_the_package(tiny: ChatTemplate) -> None:
    async def test(client: anthropic.AsyncAnthropic, running: Running) -> None:
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="another").messages.create(model="c", max_tokens=5, messages=ASK)
        with pytest.raises(anthropic.BadRequestError) as wrong:
            await client.messages.create(model="c", max_tokens=0, messages=ASK)
        assert "max_tokens" in str(wrong.value)
        with pytest.raises(anthropic.BadRequestError) as tool:
            await client.messages.create(
                model="c", max_tokens=5, messages=ASK, tools=TOOLS, tool_choice={"type": "tool", "name": "none"}
            )
        assert isinstance(tool.value.body, dict) and tool.value.body["error"]["type"] == "invalid_request_error"

    with_client(tiny, test)
