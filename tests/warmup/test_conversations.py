import json
from pathlib import Path
from typing import Any

import pytest

from rollart.app import preflight
from rollart.config import RunFile
from rollart.core.errors import ConfigError
from rollart.core.types import EpisodeTurn, Message
from rollart.models import tiny
from rollart.models.chat import ChatRenderer
from rollart.warmup.conversations import read_conversations
from rollart.warmup.prepare import Progress, file_tokens, prepare_examples

USER, ANSWER = {"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Add."}


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "chats.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    folder = tmp_path_factory.mktemp("model")
    tiny.tokenizer(128).save_pretrained(folder)
    return ChatRenderer(folder)


def test_turns_are_what_the_assistant_answers(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"messages": [SYSTEM, USER, ANSWER, USER, ANSWER, USER], "source": "web"},
        "",
        {"messages": [USER, ANSWER]},
    )
    (one, first), (three, second) = read_conversations(file)
    assert (one, three) == (1, 3)
    asked = Message("user", "2 + 2")
    assert first == [EpisodeTurn((Message("system", "Add."), asked), "4"), EpisodeTurn((asked,), "4")]
    assert second == [EpisodeTurn((asked,), "4")]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "this is not JSON"),
        ({"chat": []}, "missing required field `messages`"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, r"messages\[1\]\.content: Expected `str`"),
        ({"messages": [USER, ANSWER | {"tool_calls": []}]}, "unknown field `tool_calls`"),
        (
            {"messages": [{"role": "human", "content": "?"}]},
            r"messages\[0\] has the role 'human', which is none",
        ),
        ({"messages": [ANSWER]}, r"messages\[0\] is of the assistant and comes first"),
        ({"messages": [USER, ANSWER, ANSWER]}, r"messages\[2\] is of the assistant and follows another one"),
        ({"messages": [SYSTEM, USER]}, "no message of the assistant"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_in_one_sentence(tmp_path: Path, line: Any, sentence: str) -> None:
    file = write(tmp_path, {"messages": [USER, ANSWER]}, line)
    with pytest.raises(ConfigError, match=rf"chats\.jsonl:2: .*{sentence}") as caught:
        list(read_conversations(file))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the conversations .*: No such file"):
        list(read_conversations(tmp_path / "nothing.jsonl"))
    with pytest.raises(ConfigError, match="has no conversations"):
        list(read_conversations(write(tmp_path, "")))


def test_only_answers_and_their_ends_are_learnt(tmp_path: Path, renderer: ChatRenderer) -> None:
    file = write(tmp_path, {"messages": [SYSTEM, USER, ANSWER, USER, {"role": "assistant", "content": "four"}]})
    ((tokens, mask),) = file_tokens(file, 100, renderer, lambda progress: None)
    learnt = [token for token, bit in zip(tokens, mask, strict=True) if bit]
    assert "".join(map(renderer.piece, learnt)) == "4<|im_end|>four<|im_end|>"
    shown = "".join(map(renderer.piece, tokens))
    assert shown.startswith("<|system|>Add.<|user|>2 + 2<|assistant|>4<|im_end|>")


def test_an_answer_cannot_end_its_own_turn(tmp_path: Path, renderer: ChatRenderer) -> None:
    file = write(tmp_path, {"messages": [USER, {"role": "assistant", "content": "4<|im_end|><|user|>5"}]})
    ((tokens, _),) = file_tokens(file, 100, renderer, lambda progress: None)
    assert tokens.count(renderer.stop[0]) == 1


def test_what_is_too_long_is_cut_or_left_out(tmp_path: Path, renderer: ChatRenderer) -> None:
    late = {"messages": [{"role": "user", "content": "x" * 50}, ANSWER]}
    file = write(tmp_path, {"messages": [USER, {"role": "assistant", "content": "4" * 50}]}, late)
    seen: list[Progress] = []
    ((tokens, mask),) = file_tokens(file, 20, renderer, seen.append)
    assert len(tokens) == len(mask) == 20 and any(mask)
    assert (seen[-1].done, seen[-1].left_out) == (2, 1)


TASK = {
    "name": "guess",
    "env": "rollart.envs.guess_number:GuessNumber",
    "max_context": 8,
    "sampling": {"max_tokens": 2},
}


def test_conversations_that_leave_nothing_to_learn_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, {"messages": [{"role": "user", "content": "x" * 50}, ANSWER]})
    run = RunFile.model_validate({"model": {"tiny": {}, "warmup": {"conversations": file}}, "tasks": [TASK]})
    tiny.tokenizer(128).save_pretrained(tmp_path / "model")
    assert run.model.warmup is not None
    with pytest.raises(ConfigError, match="nothing to learn"):
        prepare_examples(run, run.model.warmup, tmp_path / "model", tmp_path / "examples", lambda progress: None)
    assert not (tmp_path / "examples").exists()


def test_conversations_need_no_players_but_demonstrations_do(tmp_path: Path) -> None:
    def warmup(**keys: Any) -> RunFile:
        return RunFile.model_validate({"model": {"tiny": {}, "warmup": keys}, "tasks": [TASK]})

    assert warmup(conversations="chats.jsonl").model.warmup.per_task == 0  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="has no `player`"):
        warmup(conversations="chats.jsonl", demonstrations=5)
    with pytest.raises(ValueError, match="has no `player`"):
        warmup()
    with pytest.raises(ValueError, match="nothing to learn from: give demonstrations or conversations"):
        warmup(demonstrations=0)


def test_the_check_of_a_run_file_reads_its_conversations(tmp_path: Path) -> None:
    file = write(tmp_path, {"messages": [USER, ANSWER]}, {"messages": []})
    run = tmp_path / "run.yaml"
    run.write_text(f"model:\n  tiny: {{}}\n  warmup:\n    conversations: {file}\ntasks:\n  - {json.dumps(TASK)}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:4: model\.warmup\.conversations: .*chats\.jsonl:2: "):
        preflight.load_run(run)
    write(tmp_path, {"messages": [USER, ANSWER]})
    assert preflight.load_run(run).model.warmup is not None
