"""One trajectory as the model saw it, with every sampled token, its group, and the same episode at other versions.

Text is cut at a length that a browser can lay out, and says so; nothing here is ever HTML.
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rollart.app.dashboard.run_index import RunIndex
from rollart.core.errors import RollartError
from rollart.core.types import Trajectory, Turn
from rollart.rollout.ledger import SqliteLedger

MAX_TEXT = 20_000  # characters of one message
_MAX_TOKENS = 4_000  # of one turn
_CONTEXT = 4  # tokens before one that decide how it is written


def read(index: RunIndex, id: str) -> dict[str, Any]:
    """Raises RollartError if the ledger has no such trajectory."""
    with _ledger(index.folder) as ledger:
        trajectory = ledger.trajectory(id)
        held_out = trajectory.group.split("-v")[0] in ("before", "after", "eval")
        members, episodes = ledger.group, ledger.evaluations
        others = episodes(trajectory.task, trajectory.member) if held_out else members(trajectory.group)
    with index.whole_events():
        row = next((n for n in range(len(index.table)) if index.table.ids[n] == trajectory.id), -1)
        turns = index.turns.of(row) if row >= 0 else {}
        about = index.table.row(row) if row >= 0 else None
        gaps = _gaps(index, trajectory.task)
    tokenizer = _tokenizer(index.folder)
    return {
        "id": trajectory.id,
        "task": trajectory.task,
        "group": trajectory.group,
        "member": trajectory.member,
        "seed": trajectory.seed,
        "outcome": trajectory.outcome.value,
        "reason": trajectory.reason,
        "reward": trajectory.reward,
        "parts": trajectory.parts,
        "success": trajectory.success,
        "seconds": trajectory.seconds,
        "temperature": trajectory.temperature,
        "action_tokens": trajectory.action_tokens,
        "total_tokens": trajectory.total_tokens,
        "about": about,
        "gaps": gaps,
        "turns": [_turn(number, turn, turns.get(number), tokenizer) for number, turn in enumerate(trajectory.turns)],
        "held_out": held_out,
        "others": [_other(each) for each in others],
    }


def log_only(index: RunIndex, id: str) -> dict[str, Any]:
    """What the event log alone knows: a simulated run has no ledger, and one under way is not in it yet."""
    with index.whole_events():
        row = next((n for n in range(len(index.table)) if index.table.ids[n] == id), -1)
        if row < 0:
            raise RollartError(f"the log has no trajectory {id!r}")
        about, turns = index.table.row(row), index.turns.of(row)
    return {**about, "about": about, "log_only": True, "steps": [turns[number] for number in sorted(turns)]}


@contextlib.contextmanager
def _ledger(folder: Path) -> Iterator[SqliteLedger]:
    try:
        with contextlib.closing(SqliteLedger.open_readonly(folder / "ledger.sqlite")) as ledger:
            yield ledger
    except sqlite3.Error as error:
        raise RollartError(f"the ledger of {folder.name} cannot be read: {error}") from error


@lru_cache(maxsize=8)
def _load(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def _tokenizer(folder: Path) -> Tokenizer | None:
    """Only one inside the run folder is read: a run file that was copied from elsewhere may name any path."""
    for name in ("model", "start"):
        path = folder / name / "tokenizer.json"
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(Exception):  # written by a newer library: the text is shown without its tokens
                return _load(path)
    return None


def _turn(number: int, turn: Turn, event: dict[str, Any] | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    kept = slice(0, _MAX_TOKENS)
    return {
        "turn": number,
        "messages": [{"role": message.role, "text": cut(message.content)} for message in turn.messages],
        "action": cut(turn.action),
        "reasoning": cut(turn.reasoning),
        "pieces": pieces(turn.tokens[kept], tokenizer) if tokenizer else None,
        "tokens": list(turn.tokens[kept]),
        "token_count": len(turn.tokens),
        "prompt_count": len(turn.prompt),
        "logprobs": [round(value, 4) for value in turn.logprobs[kept]],
        "versions": list(turn.versions[kept]),
        "finish": turn.finish,
        "reward": turn.reward,
        "generate_s": turn.generate_s,
        "env_s": turn.env_s,
        "segment": turn.segment,
        "event": event,
    }


def pieces(tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The text that each token adds; one that completes a character of several tokens has all of it."""
    found = []
    for at in range(len(tokens)):
        before = list(tokens[max(0, at - _CONTEXT) : at])
        head = tokenizer.decode(before, skip_special_tokens=False) if before else ""
        whole = tokenizer.decode([*before, tokens[at]], skip_special_tokens=False)
        found.append(whole[len(head) :] if whole.startswith(head) else whole[-1:])
    return found


def cut(text: str) -> str:
    """
    >>> cut("short")
    'short'
    """
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters are left out …\n{text[-half:]}"


def _other(trajectory: Trajectory) -> dict[str, Any]:
    version = trajectory.turns[0].versions[0] if trajectory.turns and trajectory.turns[0].versions else None
    return {
        "id": trajectory.id,
        "member": trajectory.member,
        "group": trajectory.group,
        "outcome": trajectory.outcome.value,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "turns": len(trajectory.turns),
        "tokens": trajectory.total_tokens,
        "version": version,
        "actions": [cut(turn.action)[:400] for turn in trajectory.turns[:40]],
    }


def _gaps(index: RunIndex, task: str) -> dict[int, float]:
    """By age of a token in versions: the mean gap between engine and trainer, over the last steps."""
    found: dict[int, float] = {}
    for step in index.metrics.history[-50:]:
        found |= {gap.age: gap.mean for gap in step.gaps if gap.task == task}
    return found
