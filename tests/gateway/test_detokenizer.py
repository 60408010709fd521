"""What of a response may be sent while it is generated."""

from random import Random

import pytest
from chatml import CHATML, byte_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.gateway.detokenizer import IncrementalDetokenizer, cut_at_stop
from rollart.gateway.template import ChatTemplate
from rollart.models.tool_calls import Bare, Listed, Marked, Named, Tagged, overlap

FORMATS: tuple[Tagged, ...] = (Tagged(), Bare(), Listed(), Named(), Marked())
SAID = st.lists(
    st.sampled_from([*"ab{[< \n", "é", "€", "🙂", "<tool_call>", "[TOOL_CALLS]", "</tool_call>", '{"name": "f"}']),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    path = tmp_path_factory.mktemp("bpe")
    byte_pairs(CHATML).save_pretrained(path)
    return ChatTemplate(path)


def streamed(template: ChatTemplate, tokens: list[int], detokenizer: IncrementalDetokenizer, rng: Random) -> str:
    """All that was sent, for an engine that streams one to three tokens at a time."""
    sent, at = "", 0
    while at < len(tokens) and not detokenizer.stopped:
        step = rng.randint(1, 3)
        detokenizer.add(tokens[at : at + step])
        at += step
        piece = detokenizer.unsent()
        detokenizer.sent += len(piece)
        sent += piece
    return sent


@settings(max_examples=300)
@given(seed=st.integers(0, 10**6), text=SAID, stops=st.lists(st.text("ab{<€", min_size=1, max_size=3), max_size=2))
def test_what_is_sent_is_a_prefix_of_the_final_text(
    template: ChatTemplate, seed: int, text: str, stops: list[str]
) -> None:
    rng = Random(seed)
    tokens = [*template.encode(text), *(rng.randrange(2, 260) for _ in range(rng.randint(0, 3)))]
    for form in (None, *FORMATS):
        sent = streamed(
            template, tokens, IncrementalDetokenizer(template.text, stops, form.call_start if form else None), rng
        )
        whole, end, _, _ = cut_at_stop(template.text, tokens, stops)
        rest = form.read(whole[:end])[0] if form is not None else whole[:end]
        assert rest.startswith(sent), (form, sent, rest)


def test_all_is_sent_at_once_except_what_may_become_something_else(template: ChatTemplate) -> None:
    detokenizer = IncrementalDetokenizer(template.text, ["STOP"], Tagged().call_start)
    tokens = template.encode("plain é, then ST")
    for token in tokens:
        detokenizer.add([token])
    assert detokenizer.unsent() == "plain é, then"
    detokenizer.sent += len(detokenizer.unsent())
    detokenizer.add(template.encode("ay <tool"))
    assert detokenizer.unsent() == " STay"
    detokenizer.add(template.encode("_call>{"))
    assert detokenizer.unsent() == " STay" and not detokenizer.stopped
    detokenizer.add(template.encode("STOP and more"))
    assert detokenizer.stopped


def test_half_a_character_is_not_shown(template: ChatTemplate) -> None:
    detokenizer, tokens = IncrementalDetokenizer(template.text, []), template.encode("🙂")
    assert len(tokens) == 4
    for token in tokens[:-1]:
        detokenizer.add([token])
        assert detokenizer.unsent() == ""
    detokenizer.add(tokens[-1:])
    assert detokenizer.unsent() == "🙂"


def test_the_stop_string_that_is_complete_first_ends_the_answer_with_its_last_token(template: ChatTemplate) -> None:
    tokens = template.encode("xabcd and more")
    assert cut_at_stop(template.text, tokens, ["abcd", "bc"]) == ("xabc", 2, 4, "bc")
    assert cut_at_stop(template.text, tokens, ["abc", "bc"]) == ("xabc", 1, 4, "abc")
    assert cut_at_stop(template.text, tokens, ["", "nothing"])[2:] == (len(tokens), None)


def test_an_overlap_is_a_beginning_but_not_all() -> None:
    assert [overlap(text, "aab") for text in ("", "x", "xa", "xaa", "xaab", "aa")] == [0, 0, 1, 2, 0, 2]
