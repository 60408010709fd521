"""Increments, reasoning and tool calls with templates built as those of public model families are."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from chat_families import FAMILIES, make_folder
from transformers import PreTrainedTokenizerFast

from rollart.core.action import TOOLS_ROLE, ParsedAction
from rollart.core.errors import RollartError
from rollart.core.types import EpisodeTurn, Message
from rollart.models.chat import ChatRenderer, ReasoningTags, conversation_tokens

ALL = sorted(FAMILIES)
THINKING = ("deepseek", "glm", "qwen3")
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS = [{"name": "add", "description": "adds", "parameters": PARAMETERS}]
DECLARED = Message(TOOLS_ROLE, json.dumps(TOOLS))
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "2"}}\n</tool_call>'
TEXTS = ("x", "two\nwords", "3 < 4 is all a user says", '{"a": [1, "\u00e9"]}')


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("families")
    return {name: make_folder(name, base / name) for name in ALL}


@pytest.fixture(scope="module")
def renderers(folders: dict[str, Path]) -> dict[str, ChatRenderer]:
    return {name: ChatRenderer(path) for name, path in folders.items()}


def shown(renderer: ChatRenderer, tokens: list[int]) -> str:
    return "".join(renderer.piece(token) for token in tokens)


def rendered(folder: Path, messages: list[dict[str, object]], **args: object) -> list[int]:
    """The conversation up to the next action, rendered and tokenized in one go by transformers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **args)
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_increments_add_up_to_what_the_template_renders(
    folders: dict[str, Path], renderers: dict[str, ChatRenderer], name: str, system: str | None
) -> None:
    if name == "gemma" and system:
        pytest.skip("its template refuses a system message; see the next test")
    renderer = renderers[name]
    opening = [Message("system", system)] if system else []
    messages = [*opening, Message("user", TEXTS[0])]
    whole: list[dict[str, object]] = [{"role": each.role, "content": each.content} for each in messages]
    tokens = renderer.open(messages)
    assert tokens == rendered(folders[name], whole)
    last = stop_of(renderer, "<|user|>") if name == "glm" else renderer.action("")[-1]
    for said, asked in pairwise(TEXTS):
        # The answer as the template shows it in a history: without reasoning.
        whole += [{"role": "assistant", "content": said}, {"role": "user", "content": asked}]
        expected = rendered(folders[name], whole)
        extension = renderer.extend(last, [Message("user", asked)])
        assert expected[-len(extension) :] == extension
        before = expected[: -len(extension)]
        assert before[-1] == last and renderer.text(before).rstrip().endswith(said)


def stop_of(renderer: ChatRenderer, text: str) -> int:
    return next(token for token in renderer.stop if renderer.piece(token) == text)


@pytest.mark.parametrize("name", ["qwen3", "llama3", "glm", "deepseek"])
def test_results_follow_calls_as_the_template_has_them(
    folders: dict[str, Path], renderers: dict[str, ChatRenderer], name: str
) -> None:
    renderer = renderers[name]
    opening = [DECLARED, Message("user", "add")]
    arguments: object = {"a": 1, "b": "2"}
    if name == "deepseek":
        arguments = json.dumps(arguments)
    calls = [{"type": "function", "id": "call00000", "function": {"name": "add", "arguments": arguments}}]
    whole: list[dict[str, object]] = [{"role": "user", "content": "add"}]
    described = [{"type": "function", "function": tool} for tool in TOOLS]
    prompt = renderer.open(opening)
    assert prompt == rendered(folders[name], whole, tools=described)
    action = renderer.action(CALL, opening)
    assert renderer.read(prompt, action, opening) == ParsedAction(CALL)
    whole += [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "3\n4"}]
    expected = rendered(folders[name], whole, tools=described)
    last = stop_of(renderer, "<|observation|>") if name == "glm" else action[-1]
    extension = renderer.extend(last, [Message("tool", "3\n4")])
    assert expected[-len(extension) :] == extension
    history = expected[: -len(extension)]
    written = renderer.action(CALL, opening)[:-1]
    assert history[-len(written) - 1 : -1] == written


def test_what_a_template_refuses_becomes_part_of_a_users_message(renderers: dict[str, ChatRenderer]) -> None:
    gemma = renderers["gemma"]
    opened = shown(gemma, gemma.open([DECLARED, Message("system", "Be brief."), Message("user", "hi")]))
    assert opened.startswith("<bos><start_of_turn>user\nBe brief.\n\nYou can call these tools:")
    assert opened.endswith("hi<end_of_turn>\n<start_of_turn>model\n")
    results = [Message("tool", "3"), Message("tool", "4")]
    followed = shown(gemma, gemma.extend(gemma.stop[-1], results))
    assert followed == (
        "\n<start_of_turn>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><end_of_turn>\n"
        "<start_of_turn>model\n"
    )


def test_a_header_that_the_model_sampled_is_not_rendered_again(renderers: dict[str, ChatRenderer]) -> None:
    glm = renderers["glm"]
    user, observation = stop_of(glm, "<|user|>"), stop_of(glm, "<|observation|>")
    assert shown(glm, glm.extend(user, [Message("user", "a")])) == "\na<|assistant|>"
    assert shown(glm, glm.extend(glm.action("a")[0], [Message("user", "a")])) == "<|user|>\na<|assistant|>"
    result = "\n<tool_response>\n3\n</tool_response><|assistant|>"
    assert shown(glm, glm.extend(observation, [Message("tool", "3")])) == result
    assert shown(glm, glm.extend(user, [Message("tool", "3")])) == "<|observation|>" + result
    turns = [EpisodeTurn((Message("user", "a"),), "b"), EpisodeTurn((Message("user", "c"),), "d")]
    tokens, mask = conversation_tokens(glm, turns)
    assert shown(glm, tokens) == "[gMASK]<sop><|user|>\na<|assistant|>b<|user|>\nc<|assistant|>d<|user|>"
    assert shown(glm, [token for token, learnt in zip(tokens, mask, strict=True) if learnt]) == "b<|user|>d<|user|>"


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_is_apart_from_the_answer(folders: dict[str, Path], name: str) -> None:
    opening = [DECLARED, Message("user", "hi")]
    renderer = ChatRenderer(folders[name], {"enable_thinking": True})
    prompt = renderer.open(opening)
    begun = "" if renderer.thinks(prompt) else "<think>"
    assert (begun == "") == (name == "deepseek")

    def read(text: str) -> ParsedAction:
        return renderer.read(prompt, [*renderer._encode(text), renderer.stop[-1]], opening)

    assert read(f"{begun}\nWell: <tool_call>.\n</think>\n\nYes.") == ParsedAction("Yes.", "Well: <tool_call>.")
    assert read(f"{begun}\nWell, well") == ParsedAction("", "Well, well")
    call = renderer.text(renderer.action(CALL, opening))
    assert read(f"{begun}Well.</think>{call}") == ParsedAction(CALL, "Well.")
    assert read(f"{begun}never\n{call}") == ParsedAction("", f"never\n{call}")


@pytest.mark.parametrize("name", THINKING)
def test_thinking_can_be_turned_off(folders: dict[str, Path], name: str) -> None:
    renderer = ChatRenderer(folders[name], {"enable_thinking": False})
    prompt = renderer.open([Message("user", "hi")])
    assert "</think>" in shown(renderer, prompt)[-12:] and not renderer.thinks(prompt)
    answer = [*renderer._encode("Yes."), renderer.stop[-1]]
    assert renderer.read(prompt, answer, [Message("user", "hi")]) == ParsedAction("Yes.")


def test_a_variable_that_the_template_does_not_use_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(RollartError, match="does not use 'enable_thinking'"):
        ChatRenderer(folders["smollm"], {"enable_thinking": False})
    with pytest.raises(RollartError, match="does not use 'budget'"):
        ChatRenderer(folders["qwen3"], {"budget": 3})


def test_an_answer_that_streams_is_never_taken_back() -> None:
    tags = ReasoningTags("<think>", "</think>")
    for inside, text in ((True, "a</think>\n b"), (False, " <think>a</think>\n b"), (False, "<b> a")):
        whole, start = tags.split(text, inside)
        for end in range(len(text)):
            reasoning, begin = tags.split(text[:end], inside)
            assert begin == min(start, end) or begin == end
            assert whole.startswith(reasoning.removesuffix("<").removesuffix("</")) or end < start
