"""Reasoning is apart from the answer in every API, and stays in the tokens of the conversation."""

import asyncio

import anthropic
import openai
import pytest
from chat_families import make_folder
from gateways import KEY, Policy, Running, gateway

from rollart.gateway.template import ChatTemplate

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
SAYS = f"<think>\nI could <tool_call> it.\n</think>\n\nYes, all.\n{CALL}"
THOUGHT, ANSWER = "I could <tool_call> it.", "Yes, all."
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate(make_folder("qwen3", tmp_path_factory.mktemp("qwen") / "model"))


async def streamed(client: openai.AsyncOpenAI) -> tuple[list[str], str, str]:
    """The order of the deltas, the reasoning and the answer."""
    kinds, thought, answer = [], "", ""
    async for chunk in await client.chat.completions.create(model="m", messages=ASK, tools=[TOOL], stream=True):  # type: ignore[list-item]
        delta = chunk.choices[0].delta
        if reasoning := getattr(delta, "reasoning_content", None):
            kinds.append("reasoning")
            thought += reasoning
        if delta.content:
            kinds.append("content")
            answer += delta.content
        if delta.tool_calls:
            kinds.append("call")
    return kinds, thought, answer


def test_openai_clients_get_reasoning_content(qwen: ChatTemplate) -> None:
    async def run(running: Running) -> None:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=KEY) as client:
            response = await client.chat.completions.create(model="m", messages=ASK, tools=[TOOL])  # type: ignore[list-item]
            message = response.choices[0].message
            assert (message.content, getattr(message, "reasoning_content", None)) == (ANSWER, THOUGHT)
            assert message.tool_calls is not None and message.tool_calls[0].function.name == "f"  # type: ignore[union-attr]
            call = message.tool_calls[0]
            result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
            history = [*ASK, message.model_dump(exclude_none=True), result]
            await client.chat.completions.create(model="m", messages=history, tools=[TOOL])  # type: ignore[arg-type, list-item]
            kinds, thought, answer = await streamed(client)
            assert (thought, answer) == (THOUGHT, ANSWER)
            assert kinds[0] == "reasoning" and kinds[-1] == "call" and kinds.count("reasoning") == 1
        first, second = (request.tokens for request, _ in running.policy.seen[:2])
        assert second[: len(first)] == first and "I could" in qwen.text(second[len(first) :])
        captured = running.sessions.close(KEY)
        assert [turn.reasoning for turn in captured.turns] == [THOUGHT] * 3
        assert captured.turns[0].action.startswith(f"{ANSWER}\n<tool_call>")
        assert captured.counts.segments == 2 and captured.counts.mismatches == 0

    asyncio.run(_run(qwen, run))


def test_anthropic_clients_get_a_thinking_block(qwen: ChatTemplate) -> None:
    async def run(running: Running) -> None:
        async with anthropic.AsyncAnthropic(base_url=running.url, api_key=KEY) as client:
            message = await client.messages.create(model="m", max_tokens=200, messages=ASK)  # type: ignore[arg-type]
            assert [block.type for block in message.content] == ["thinking", "text"]
            async with client.messages.stream(model="m", max_tokens=200, messages=ASK) as stream:  # type: ignore[arg-type]
                final = await stream.get_final_message()
            assert final.content[0].type == "thinking" and final.content[0].thinking == THOUGHT
            assert final.content[1].type == "text" and final.content[1].text.startswith(ANSWER)

    asyncio.run(_run(qwen, run))


def test_a_text_that_is_continued_keeps_its_reasoning(qwen: ChatTemplate) -> None:
    async def run(running: Running) -> None:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=KEY) as client:
            response = await client.completions.create(model="m", prompt="hi")
            assert response.choices[0].text == SAYS

    asyncio.run(_run(qwen, run))


async def _run(template: ChatTemplate, test: "object") -> None:
    async with gateway(template, Policy(template, lambda request: SAYS)) as running:
        async with asyncio.timeout(60):
            await test(running)  # type: ignore[operator]
