"""What of an answer may be shown while it is made."""

from random import Random

import pytest
from chatml import CHATML, byte_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.gateway.template import ChatTemplate
from rollart.gateway.tools import Bare, Listed, Marked, Named, Tagged, ToolFormat
from rollart.gateway.transcript import Transcript, cut, overlap

FORMATS: tuple[ToolFormat, ...] = (Tagged(), Bare(), Listed(), Named(), Marked())
SAID = st.lists(
    st.sampled_from([*"ab{[< \n", "é", "€", "🙂", "<tool_call>", "[TOOL_CALLS]", "</tool_call>", '{"name": "f"}']),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    path = tmp_path_factory.mktemp("bpe")
    byte_pairs(CHATML).save_pretrained(path)
    return ChatTemplate(path)


def told(template: ChatTemplate, tokens: list[int], script: Transcript, rng: Random) -> str:
    """All that was shown, for an engine that tells of one to three tokens at a time."""
    shown, at = "", 0
    while at < len(tokens) and not script.over:
        step = rng.randint(1, 3)
        script.add(tokens[at : at + step])
        at += step
        piece = script.fresh()
        script.shown += len(piece)
        shown += piece
    return shown


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 10**6), text=SAID, stops=st.lists(st.text("ab{<€", min_size=1, max_size=3), max_size=2))
def test_what_is_shown_is_a_beginning_of_what_is_said_in_the_end(
    template: ChatTemplate, seed: int, text: str, stops: list[str]
) -> None:
    rng = Random(seed)
    tokens = [*template.encode(text), *(rng.randrange(2, 260) for _ in range(rng.randint(0, 3)))]
    for form in (None, *FORMATS):
        shown = told(template, tokens, Transcript(template.text, stops, form.held if form else None), rng)
        whole, end, _, _ = cut(template.text, tokens, stops)
        rest = form.read(whole[:end])[0] if form is not None else whole[:end]
        assert rest.startswith(shown), (form, shown, rest)


def test_all_is_shown_at_once_but_what_may_turn_out_to_be_something_else(template: ChatTemplate) -> None:
    script = Transcript(template.text, ["STOP"], Tagged().held)
    tokens = template.encode("plain é, then ST")
    for token in tokens:
        script.add([token])
    assert script.fresh() == "plain é, then"
    script.shown += len(script.fresh())
    script.add(template.encode("ay <tool"))
    assert script.fresh() == " STay"
    script.add(template.encode("_call>{"))
    assert script.fresh() == " STay" and not script.over
    script.add(template.encode("STOP and more"))
    assert script.over


def test_half_a_character_is_not_shown(template: ChatTemplate) -> None:
    script, tokens = Transcript(template.text, []), template.encode("🙂")
    assert len(tokens) == 4
    for token in tokens[:-1]:
        script.add([token])
        assert script.fresh() == ""
    script.add(tokens[-1:])
    assert script.fresh() == "🙂"


def test_the_stop_string_that_is_complete_first_ends_the_answer_with_its_last_token(template: ChatTemplate) -> None:
    tokens = template.encode("xabcd and more")
    assert cut(template.text, tokens, ["abcd", "bc"]) == ("xabc", 2, 4, "bc")
    assert cut(template.text, tokens, ["abc", "bc"]) == ("xabc", 1, 4, "abc")
    assert cut(template.text, tokens, ["", "nothing"])[2:] == (len(tokens), None)


def test_an_overlap_is_a_beginning_but_not_all() -> None:
    assert [overlap(text, "aab") for text in ("", "x", "xa", "xaa", "xaab", "aa")] == [0, 0, 1, 2, 0, 2]
