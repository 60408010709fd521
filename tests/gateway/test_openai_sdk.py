"""The gateway through the real `openai` package."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from gateways import KEY, Policy, Running, episode_limits, gateway

from rollart.gateway.limits import GatewayLimits
from rollart.gateway.template import ChatTemplate

ASK: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def with_client(
    template: ChatTemplate,
    test: Callable[[openai.AsyncOpenAI, Running], Awaitable[None]],
    says: str | None = None,
    **more: Any,
) -> None:
    async def run() -> None:
        policy = Policy(template, say=lambda request: says)
        async with (
            gateway(template, policy, **more) as running,
            openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=KEY, max_retries=0, timeout=20) as client,
        ):
            await test(client, running)

    asyncio.run(run())


def test_a_chat_completion_has_text_usage_and_the_logprobs_of_its_tokens(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        answer = await client.chat.completions.create(model="gpt", messages=ASK, logprobs=True)
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("fine", "stop")
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
            len(running.policy.seen[0][0].tokens),
            5,
        )
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [piece.logprob for piece in choice.logprobs.content] == running.policy.seen[0][1].logprobs

    with_client(tiny, test, "fine")


def test_a_stream_has_the_same_text_as_the_whole_response(tiny: ChatTemplate) -> None:
    says = "a long answer, " * 12

    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        text, chunks, usage, finish = "", 0, None, None
        async for chunk in await client.chat.completions.create(
            model="gpt", messages=ASK, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
                chunks += 1
        assert (text, finish) == (says, "stop")
        assert chunks > 3
        assert usage is not None and usage.completion_tokens == len(says) + 1

    with_client(tiny, test, says)


def test_the_first_delta_is_there_before_the_answer_is_complete(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        pause = running.policy.pause = asyncio.Event()
        chat = await client.chat.completions.create(model="gpt", messages=ASK, stream=True)
        first = [(await anext(chat)).choices[0].delta.content for _ in range(2)]
        assert first == ["", "s"] and not running.policy.seen
        plain = await client.completions.create(model="gpt", prompt="x", stream=True)
        assert (await anext(plain)).choices[0].text == "s"
        async with client.responses.stream(model="gpt", input="y") as response:
            async for event in response:
                if event.type == "response.output_text.delta":
                    assert event.delta == "s" and len(running.policy.seen) == 0
                    break
            pause.set()
            assert (await response.get_final_response()).output_text == "slowly"
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chat]) == "lowly"
        assert "".join([chunk.choices[0].text async for chunk in plain]) == "lowly"

    with_client(tiny, test, "slowly")


def test_text_streams_until_a_tool_call_may_begin_which_comes_whole(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        deltas = [
            chunk.choices[0].delta
            async for chunk in await client.chat.completions.create(model="gpt", messages=ASK, tools=TOOLS, stream=True)
        ]
        texts = [delta.content for delta in deltas if delta.content]
        assert "".join(texts) == "I < add." and len(texts) > 3
        (call,) = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
        assert call.function is not None and json.loads(call.function.arguments or "") == {"a": 2, "b": 3}

    with_client(tiny, test, f"I < add. {CALL}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_generation_early_and_what_was_sampled_until_then_is_trained(
    tiny: ChatTemplate, stream: bool
) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        answer: Any = await client.chat.completions.create(model="gpt", messages=ASK, stop=["END"], stream=stream)
        if stream:
            chunks = [chunk.choices[0] async for chunk in answer]
            said = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
        else:
            said = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert said == ("so far ", "stop")
        (_, made), (turn,) = running.policy.seen[0], running.sessions.close(KEY).turns
        assert len("so far END") <= len(made.tokens) < 30
        assert tiny.text(turn.tokens) == "so far END" and list(turn.logprobs) == made.logprobs[:10]

    with_client(tiny, test, "so far END" + " and on" * 50)


def test_engines_that_are_lost_in_the_middle_of_a_stream_are_an_error_in_it(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        running.policy.lost = True
        chat = await client.chat.completions.create(model="gpt", messages=ASK, stream=True)
        with pytest.raises(openai.APIError, match="every engine was lost"):
            async for _ in chat:
                pass
        running.policy.lost = False
        whole = await client.chat.completions.create(model="gpt", messages=ASK, stop=["zzz"])
        assert whole.choices[0].message.content == "fine"
        captured = running.sessions.close(KEY)
        assert len(captured.turns) == 1

    with_client(tiny, test, "fine")


def test_a_format_that_cannot_be_enforced_is_a_bad_request(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
        with pytest.raises(openai.BadRequestError, match="only text") as refused:
            await client.chat.completions.create(model="gpt", messages=ASK, response_format=schema)
        assert refused.value.param == "response_format.type"
        text: Any = {"format": {"type": "json_object"}}
        with pytest.raises(openai.BadRequestError, match="only text"):
            await client.responses.create(model="gpt", input="x", text=text)
        await client.chat.completions.create(model="gpt", messages=ASK, response_format={"type": "text"})

    with_client(tiny, test, "fine")


def test_a_tool_call_is_parsed_and_its_result_continues_the_same_tokens(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        answer = await client.chat.completions.create(model="gpt", messages=ASK, tools=TOOLS)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls is not None and message.tool_calls[0].type == "function"
        call = message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
        # As frameworks do: the arguments are decoded and encoded again, with other spaces and another order.
        changed = json.dumps({"b": 3, "a": 2}, separators=(",", ":"))
        back = {"id": call.id, "type": "function", "function": {"name": "add", "arguments": changed}}
        more: Any = [
            *ASK,
            {"role": "assistant", "content": message.content, "tool_calls": [back]},
            {"role": "tool", "tool_call_id": call.id, "content": "5"},
        ]
        await client.chat.completions.create(model="gpt", messages=more, tools=TOOLS)
        (first, made), (second, _) = running.policy.seen
        assert second.tokens[: len(first.tokens) + len(made.tokens)] == first.tokens + made.tokens
        assert "adds" in tiny.text(first.tokens)
        assert running.sessions.close(KEY).counts.forks == 0

    with_client(tiny, test, f"I add.{CALL}")


def test_a_tool_call_streams_with_its_arguments(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        async with client.chat.completions.stream(model="gpt", messages=ASK, tools=TOOLS) as stream:
            answer = await stream.get_final_completion()
        calls = answer.choices[0].message.tool_calls
        assert calls is not None and json.loads(calls[0].function.arguments) == {"a": 2, "b": 3}

    with_client(tiny, test, CALL)


def test_the_forced_beginning_of_a_tool_call_is_prompt_and_not_trained(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        named: Any = {"type": "function", "function": {"name": "add"}}
        answer = await client.chat.completions.create(model="gpt", messages=ASK, tools=TOOLS, tool_choice=named)
        calls = answer.choices[0].message.tool_calls
        assert calls is not None and calls[0].type == "function" and calls[0].function.name == "add"
        turn = running.sessions.close(KEY).turns[0]
        assert tiny.text(turn.tokens) == '{"a": 1}}'
        assert tiny.text(turn.prompt).endswith('{"name": "add", "arguments": ')

    with_client(tiny, test, '{"a": 1}}')


def test_tool_choice_none_leaves_what_looks_like_a_call_as_text(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        answer = await client.chat.completions.create(model="gpt", messages=ASK, tools=TOOLS, tool_choice="none")
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].message.tool_calls is None

    with_client(tiny, test, CALL)


def test_several_choices_are_several_segments_and_each_can_be_continued(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        answer = await client.chat.completions.create(model="gpt", messages=ASK, n=3, seed=5)
        assert len({choice.message.content for choice in answer.choices}) == 3
        chosen: Any = answer.choices[2].message.model_dump(exclude_none=True)
        await client.chat.completions.create(model="gpt", messages=[*ASK, chosen, *ASK])
        captured = running.sessions.close(KEY)
        assert [turn.segment for turn in captured.turns] == [0, 1, 2, 2]

    with_client(tiny, test)


def test_the_seed_decides_the_answer(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        said = [
            (await client.chat.completions.create(model="gpt", messages=ASK, seed=seed)).choices[0].message.content
            for seed in (1, 2, 1)
        ]
        assert said[0] == said[2] != said[1]

    with_client(tiny, test)


def test_a_stop_string_ends_the_answer_and_its_tokens_are_kept(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        answer = await client.chat.completions.create(model="gpt", messages=ASK, stop=["STOP", "never"])
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("before ", "stop")
        said: Any = {"role": "assistant", "content": "before "}
        await client.chat.completions.create(model="gpt", messages=[*ASK, said, *ASK])
        captured = running.sessions.close(KEY)
        assert tiny.text(captured.turns[0].tokens) == "before STOP"
        assert [turn.segment for turn in captured.turns] == [0, 0]

    with_client(tiny, test, "before STOP after")


def test_max_tokens_ends_the_answer_by_length(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        answer = await client.chat.completions.create(model="gpt", messages=ASK, max_completion_tokens=3)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("lon", "length")

    with_client(tiny, test, "long answer")


def test_completions_continue_a_text_by_its_tokens(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        answer = await client.completions.create(model="gpt", prompt="once upon", logprobs=1)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" a time", "stop")
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.token_logprobs == running.policy.seen[0][1].logprobs
        # What the policy ended is continued without its end of turn, so as another segment.
        cut = await client.completions.create(model="gpt", prompt="once upon a time there", max_tokens=3)
        first, second = (request.tokens for request, _ in running.policy.seen)
        assert second[: len(first) + 7] == first + running.policy.seen[0][1].tokens[:-1]
        assert cut.choices[0].finish_reason == "length"
        await client.completions.create(model="gpt", prompt="once upon a time there a and")
        assert [turn.segment for turn in running.sessions.close(KEY).turns] == [0, 1, 1]

    with_client(tiny, test, " a time")


def test_a_response_can_be_continued_by_its_id(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        first = await client.responses.create(model="gpt", input="hello", instructions="be kind")
        assert first.output_text == "fine"
        await client.responses.create(model="gpt", input="more", previous_response_id=first.id, instructions="be kind")
        captured = running.sessions.close(KEY)
        assert [turn.segment for turn in captured.turns] == [0, 0]

    with_client(tiny, test, "fine")


def test_a_response_streams_tool_calls_and_takes_their_results(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        tools: Any = [{"type": "function", "name": "add", "parameters": {}, "strict": None}]
        async with client.responses.stream(model="gpt", input="hello", tools=tools) as stream:
            answer = await stream.get_final_response()
        (call,) = answer.output
        assert call.type == "function_call" and json.loads(call.arguments) == {"a": 2, "b": 3}
        items: Any = [
            {"role": "user", "content": "hello"},
            {"type": "function_call", "call_id": call.call_id, "name": "add", "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "5"},
        ]
        await client.responses.create(model="gpt", input=items, tools=tools)
        assert [turn.segment for turn in running.sessions.close(KEY).turns] == [0, 0]

    with_client(tiny, test, CALL)


def test_errors_are_those_of_the_package(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        with pytest.raises(openai.AuthenticationError) as unknown:
            await client.with_options(api_key="another").chat.completions.create(model="gpt", messages=ASK)
        assert "another" not in str(unknown.value)
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(model="gpt", messages=ASK, max_tokens=-1)
        assert wrong.value.param == "max_tokens"
        with pytest.raises(openai.BadRequestError) as image:
            picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
            await client.chat.completions.create(model="gpt", messages=picture)
        assert image.value.param == "messages[0].content"
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="gpt", input="x", previous_response_id="resp_of_another")
        with pytest.raises(openai.NotFoundError) as model:
            await client.chat.completions.create(model="other", messages=ASK)
        assert model.value.code == "model_not_found"
        assert [listed.id async for listed in client.models.list()] == ["policy"]

    with_client(tiny, test, any_model=False, limits=GatewayLimits())


def test_a_context_that_is_too_long_is_a_bad_request_and_truncates_the_episode(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        running.sessions.open("small", episode_limits("small", max_context=10))
        with pytest.raises(openai.BadRequestError) as long:
            await client.with_options(api_key="small").chat.completions.create(
                model="gpt", messages=[{"role": "user", "content": "x" * 10}]
            )
        assert long.value.code == "context_length_exceeded"
        assert running.sessions.close("small").truncated

    with_client(tiny, test)


def test_an_episode_with_too_many_requests_gets_a_429(tiny: ChatTemplate) -> None:
    async def test(client: openai.AsyncOpenAI, running: Running) -> None:
        running.policy.gate = asyncio.Event()
        running.sessions.open("one", episode_limits("one", max_parallel=1))
        narrow = client.with_options(api_key="one")
        first = asyncio.create_task(narrow.chat.completions.create(model="gpt", messages=ASK))
        await running.policy.begun.wait()
        with pytest.raises(openai.RateLimitError) as limited:
            await narrow.chat.completions.create(model="gpt", messages=ASK)
        assert limited.value.response.headers["retry-after"] == "1"
        running.policy.gate.set()
        await first

    with_client(tiny, test)
