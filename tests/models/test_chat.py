"""Rendering by increments against the template's own rendering of the whole conversation."""

from pathlib import Path

import pytest
from chatml import CHATML, byte_pairs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rollart.core.errors import RollartError
from rollart.core.types import EpisodeTurn, Message
from rollart.models import tiny
from rollart.models.chat import ChatRenderer, conversation_tokens

TRIMMING = CHATML.replace("message['content']", "(message['content'] | trim)")
SPACED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' <|im_end|>' }}"
    "{% else %}{{ '[' + message['content'] + ']' }}{% endif %}{% endfor %}"
)
ENDLESS = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"


def folder(path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("tokenizers")
    made = {"tiny": tiny.tokenizer(512), "chatml": byte_pairs(CHATML), "trimming": byte_pairs(TRIMMING)}
    return {name: folder(base / name, tokenizer) for name, tokenizer in made.items()}


@pytest.fixture(scope="module")
def renderers(folders: dict[str, Path]) -> dict[str, ChatRenderer]:
    return {name: ChatRenderer(path) for name, path in folders.items()}


TEXT = st.text(st.characters(codec="ascii", exclude_characters="<"), max_size=30)
ROUND = st.tuples(TEXT, TEXT.map(str.strip))


def whole(path: Path, turns: list[EpisodeTurn]) -> list[int]:
    """The finished conversation, rendered and tokenized in one go by transformers, up to the last end of turn."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    messages = [
        {"role": message.role, "content": message.content}
        for turn in turns
        for message in (*turn.messages, Message("assistant", turn.action))
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return tokenizer.encode(text[: text.rindex("<|im_end|>") + len("<|im_end|>")], add_special_tokens=False)


@pytest.mark.parametrize("name", ["tiny", "chatml", "trimming"])
@given(system=st.none() | TEXT, rounds=st.lists(ROUND, min_size=1, max_size=4))
@settings(max_examples=60)
def test_increments_add_up_to_the_whole_conversation(
    folders: dict[str, Path], renderers: dict[str, ChatRenderer], name: str, system: str | None, rounds: list
) -> None:
    opening = () if system is None else (Message("system", system),)
    turns = [
        EpisodeTurn((*(opening if number == 0 else ()), Message("user", asked)), action)
        for number, (asked, action) in enumerate(rounds)
    ]
    tokens, mask = conversation_tokens(renderers[name], turns)
    assert tokens == whole(folders[name], turns)
    assert len(mask) == len(tokens)
    made = [token for token, chosen in zip(tokens, mask, strict=True) if chosen]
    assert made == [token for turn in turns for token in renderers[name].action(turn.action)]


@pytest.mark.parametrize("name", ["tiny", "chatml"])
@given(text=TEXT)
@settings(max_examples=60)
def test_an_action_reads_as_it_was_written(renderers: dict[str, ChatRenderer], name: str, text: str) -> None:
    readable = "".join(letter for letter in text if letter in tiny.CHARACTERS)
    assert renderers[name].text(renderers[name].action(readable)) == readable


@pytest.mark.parametrize("name", ["tiny", "chatml", "trimming"])
def test_an_action_that_was_cut_gets_its_end_of_turn(renderers: dict[str, ChatRenderer], name: str) -> None:
    renderer, answer = renderers[name], (Message("user", " no "),)
    ended = renderer.extend(renderer.stop[0], answer)
    assert renderer.extend(renderer.action("a")[0], answer) == [*renderer.stop, *ended]
    assert renderer.stop[0] not in ended[:1]


@pytest.mark.parametrize("name", ["tiny", "chatml", "trimming"])
def test_several_messages_at_once_follow_the_template(
    folders: dict[str, Path], renderers: dict[str, ChatRenderer], name: str
) -> None:
    turns = [
        EpisodeTurn((Message("system", "s"), Message("user", "a")), "b"),
        EpisodeTurn((Message("tool", " 7\n"), Message("user", "\nc")), "d"),
    ]
    assert conversation_tokens(renderers[name], turns)[0] == whole(folders[name], turns)


def test_a_template_that_only_wraps_is_not_run_again_per_turn(renderers: dict[str, ChatRenderer]) -> None:
    assert renderers["tiny"]._glue("user") == ("<|user|>", "<|assistant|>")
    assert renderers["chatml"]._glue("user") is not None
    assert renderers["trimming"]._glue("user") is None


def test_text_before_the_end_of_turn_is_added_to_cut_actions_only(tmp_path: Path) -> None:
    renderer = ChatRenderer(folder(tmp_path, byte_pairs(SPACED)))
    answer = (Message("user", "no"),)
    ended, cut = renderer.extend(renderer.stop[0], answer), renderer.extend(renderer.action("a")[0], answer)
    assert renderer._backend.decode(ended, skip_special_tokens=False) == "[no]"
    assert renderer._backend.decode(cut, skip_special_tokens=False) == " <|im_end|>[no]"


def test_a_character_outside_the_alphabet_is_unknown_and_harmless(renderers: dict[str, ChatRenderer]) -> None:
    renderer = renderers["tiny"]
    assert renderer.open([Message("user", "a\u00e9\U0001f642b")]).count(tiny.SPECIAL.index(tiny.UNKNOWN)) == 2
    assert renderer.text(renderer.action("a\u00e9b")) == "ab"


def test_every_stop_token_of_the_folder_is_honoured(tmp_path: Path) -> None:
    folder(tmp_path, byte_pairs(CHATML))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 9]}')
    assert ChatRenderer(tmp_path).stop == (0, 9)


@settings(max_examples=40)
@given(
    st.sampled_from(["tiny", "chatml", "trimming"]),
    st.lists(
        st.tuples(st.sampled_from(["a", " ", "all ", "user\n\n", "\U0001f600"]), st.integers(0, 5000)), max_size=4
    ),
    st.integers(1, 20_000),
)
@example("trimming", [("a", 4448), ("all ", 1771), (" ", 26)], 8007)
def test_only_messages_that_are_too_long_are_reported_not_to_fit(
    renderers: dict[str, ChatRenderer], name: str, parts: list[tuple[str, int]], room: int
) -> None:
    messages = [Message("user", "".join(text * times for text, times in parts))]
    fits = renderers[name].may_fit(messages, room)
    assert fits or len(renderers[name].extend(renderers[name].stop[0], messages)) > room


def test_millions_of_characters_are_reported_not_to_fit_without_tokenizing_them(
    renderers: dict[str, ChatRenderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer, encoded = renderers["chatml"], list[int]()
    monkeypatch.setattr(renderer, "_encode", lambda text: encoded.append(len(text)) or [0] * len(text))
    assert not renderer.may_fit([Message("user", "a" * 3_000_000)], 1000)
    assert not renderer.may_fit([Message("user", "")] * 1001, 1000)
    assert not renderer.may_fit([Message("user", "a" * 9_000)], 1000)
    assert sum(encoded) <= 2_000  # of the last, which might have fitted


def test_the_caller_may_change_what_it_got(renderers: dict[str, ChatRenderer]) -> None:
    messages = (Message("user", "a"),)
    first = renderers["tiny"].open(messages)
    first.append(0)
    assert renderers["tiny"].open(messages) == first[:-1]


@pytest.mark.parametrize("size", [2_000, 120_000])
def test_the_members_of_a_group_tokenize_their_opening_once(
    renderers: dict[str, ChatRenderer], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    renderer, seen = next(iter(renderers.values())), 0

    def counted(text: str) -> list[int]:
        nonlocal seen
        seen += len(text)
        return ChatRenderer._encode(renderer, text)

    monkeypatch.setattr(renderer, "_encode", counted)
    openings = [[Message("user", f"own {size} " + "7 " * (size // 2))] for _ in range(4)]
    first, *others = (renderer.open(messages) for messages in openings)
    assert all(other == first and other is not first for other in others) and isinstance(first, list)
    assert size <= seen < 1.2 * size
    if size > 8_000:
        fit = {renderer.may_fit(messages, size - 1) for messages in openings}
        assert len(fit) == 1 and seen < 2.4 * size, "nor is it counted again whether it fits"


def test_a_folder_that_cannot_chat_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(RollartError, match=r"no tokenizer\.json"):
        ChatRenderer(tmp_path)
    with pytest.raises(RollartError, match="no chat template"):
        ChatRenderer(folder(tmp_path / "base", byte_pairs(None)))
    with pytest.raises(RollartError, match="no end-of-turn token"):
        ChatRenderer(folder(tmp_path / "endless", byte_pairs(ENDLESS)))
