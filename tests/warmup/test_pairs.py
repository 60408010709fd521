"""Files of pairs: what is read, how samples are paired, and what each mistake says."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollart.config import PreferenceConfig
from rollart.core.errors import ConfigError
from rollart.warmup.pairs import PairFile

ASK = [{"role": "user", "content": "2 + 2?"}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def opened(folder: Path, lines: list[Any], **more: Any) -> PairFile:
    path = folder / "pairs.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return PairFile(PreferenceConfig(pairs=path, **more))


def sample(episode: str, reward: float, text: str) -> dict[str, Any]:
    return {"task": "sums", "episode": episode, "reward": reward, "messages": ASK + said(text), "success": True}


def test_a_pair_is_two_conversations_or_a_prompt_and_two_answers(tmp_path: Path) -> None:
    whole = {"chosen": ASK + said("4"), "rejected": ASK + said("5"), "source": "by hand"}
    answers = {"prompt": ASK, "chosen": said("4"), "rejected": said("5")}
    texts = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
    first, *others = opened(tmp_path, [whole, "", answers, texts])
    assert first.chosen[0].action == "4" and first.rejected[0].action == "5"
    assert first.chosen[0].messages[0].content == "2 + 2?"
    assert [(pair.chosen, pair.rejected) for pair in others] == [(first.chosen, first.rejected)] * 2
    assert [pair.place.rpartition(":")[2] for pair in (first, *others)] == ["1", "3", "4"]


def test_samples_of_an_episode_are_paired_from_the_outside_in(tmp_path: Path) -> None:
    rewards = {"a": 0.2, "b": 1.0, "c": 0.0, "d": 0.5}
    lines = [sample("one", reward, text) for text, reward in rewards.items()]
    lines += [sample("two", 1.0, "e"), sample("two", 1.0, "f"), sample("three", 1.0, "g")]
    found = [(pair.chosen[0].action, pair.rejected[0].action) for pair in opened(tmp_path, lines)]
    assert found == [("b", "c"), ("d", "a")], "equal rewards and lone attempts say nothing"
    assert len(opened(tmp_path, lines, per_episode=1)) == 1
    assert len(opened(tmp_path, lines, min_margin=0.4)) == 1


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", r"pairs.jsonl:1: this is not JSON"),
        ({"chosen": ASK + said("4")}, r":1: the key 'rejected' is missing; a line is"),
        ({"chosen": 4, "rejected": "5"}, r":1: Expected `str \| array \| null`, got `int` - at `\$.chosen`; a line is"),
        ({"chosen": "4", "rejected": "5"}, r":1: chosen: messages\[0\] is of the assistant and comes first"),
        ({"prompt": "?", "chosen": "4", "rejected": "4"}, r":1: chosen and rejected are the same"),
        ({"chosen": ASK, "rejected": ASK + said("4")}, r":1: chosen: the conversation has no message of the assistant"),
        (
            {"messages": ASK + said("4"), "episode": "one"},
            r":1: a line with `messages` .* needs 'reward'",
        ),
    ],
)
def test_a_mistake_is_a_sentence_that_names_the_line(line: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        opened(tmp_path, [line])


def test_a_file_without_pairs_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no pairs: no two attempts at one of its 1 episodes differ in reward"):
        opened(tmp_path, [sample("one", 1.0, "4"), sample("one", 1.0, "5")])
    with pytest.raises(ConfigError, match=r"has no pairs$"):
        opened(tmp_path, [""])
    with pytest.raises(ConfigError, match=r"cannot read the pairs .*: No such file"):
        PairFile(PreferenceConfig(pairs=tmp_path / "gone.jsonl"))
    with pytest.raises(ConfigError, match=r"no preference.pairs"):
        PairFile(PreferenceConfig())
