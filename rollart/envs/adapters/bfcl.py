"""BFCL's multi-turn tasks: a user makes several requests in turn, tools on an MCP server carry them out.

The tools run on the real back ends; BFCL's own checker scores, by comparing states and replies with a reference.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import bfcl_eval
from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC as MORE_TOOLS
from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker, multi_turn_utils

from rollart.envs.adapters.mcp import McpCall, McpTools
from rollart.envs.adapters.mcp_client import McpClient
from rollart.envs.tools import call_text

DATA = Path(bfcl_eval.__file__).parent / "data"
SERVER = Path(__file__).with_name("bfcl_server.py")
CATEGORIES = ("base", "long_context", "miss_param", "miss_func")


class Bfcl(McpTools):
    """One entry in five is held out. In `miss_func` a tool that is needed is offered only after it was missed."""

    def __init__(self, category: str = "base", max_calls: int = 40, held_out: bool = False) -> None:
        job, job_args = "rollart.envs.adapters.bfcl:Conversation", {"category": category}
        command = [sys.executable, "-I", str(SERVER)]  # without its folder, whose modules have the names of packages
        super().__init__(job, job_args, command=command, max_calls=max_calls, held_out=held_out)


class Conversation:
    """A `Job`: the user's side of one entry, and its score."""

    _episodes = itertools.count()

    def __init__(self, category: str) -> None:
        if category not in CATEGORIES:
            raise ValueError(f"`category` is {category!r}; it can be {', '.join(CATEGORIES)}")
        name = f"BFCL_v4_multi_turn_{category}.json"
        references = {row["id"]: row["ground_truth"] for row in _rows(DATA / "possible_answer" / name)}
        self.category = category
        self.entries: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for row in _rows(DATA / name):
            self.entries[belongs_to_held_out(row["id"])].append({**row, "reference": references[row["id"]]})
        self.entry: dict[str, Any] = {}
        self.round = 0
        self.client: McpClient

    def begin(self, client: McpClient, seed: int) -> str:
        known = self.entries[bool(seed % 2)]
        self.entry, self.round = known[seed // 2 % len(known)], 0
        self.client = client
        begin = {
            "classes": self.entry["involved_classes"],
            "config": self.entry["initial_config"],
            "long_context": self.category == "long_context",
            "without": self.entry.get("excluded_function", []),
            "later": [name for names in self.entry.get("missed_function", {}).values() for name in names],
        }
        client.call("_begin", begin)
        return self._question()

    def follow(self, answer: str) -> str | None:
        self.round += 1
        if missed := self.entry.get("missed_function", {}).get(str(self.round)):
            self.client.call("_offer", {"names": missed})
            return str(MORE_TOOLS)
        return self._question() if self.round < len(self.entry["question"]) else None

    def score(self, client: McpClient, calls: list[McpCall], answer: str) -> float:
        entry, player = self.entry, f"rollart{next(self._episodes)}"
        made = [[[_source(call)] for call in calls if call.round == turn] for turn in range(len(entry["question"]))]
        try:
            verdict = multi_turn_checker.multi_turn_checker(made, entry["reference"], entry, self.category, player)
        finally:
            # The checker keeps the back ends of each player forever.
            for name in [name for name in vars(multi_turn_utils) if name.startswith(player)]:
                delattr(multi_turn_utils, name)
        return float(verdict["valid"])

    def _question(self) -> str:
        return "\n".join(message["content"] for message in self.entry["question"][self.round])


def belongs_to_held_out(entry: str) -> bool:
    """By its number alone: the categories are variants of the same tasks."""
    return hashlib.sha256(entry.rsplit("_", 1)[1].encode()).digest()[0] % 5 == 0


def player(env: Bfcl, rng: random.Random, *, skill: float = 1.0) -> str:
    """Makes the reference's calls, then says so; with probability 1 - `skill` it only says so."""
    job: Any = env.job
    reference = job.entry["reference"][job.round]
    if any(call.round == env.round for call in env.calls) or not reference or rng.random() >= skill:
        return "Done."
    return "\n".join(call_text(**_call(source, job.entry["involved_classes"])) for source in reference)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _source(call: McpCall) -> str:
    """As BFCL writes calls. It evaluates them, so only names of its tools and plain values may be in them."""
    if not all(name.isidentifier() for name in call.arguments):
        return "None"  # the tool has refused it, too
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def _call(source: str, classes: list[str]) -> dict[str, Any]:
    """The inverse; positional arguments get their names from the tool's description."""
    tree = ast.parse(source, mode="eval").body
    assert isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)
    folder = DATA / "multi_turn_func_doc"
    docs = [row for name in classes for row in _rows(folder / MULTI_TURN_FUNC_DOC_FILE_MAPPING[name])]
    names = next(list(row["parameters"]["properties"]) for row in docs if row["name"] == tree.func.id)
    arguments = {name: ast.literal_eval(value) for name, value in zip(names, tree.args, strict=False)}
    arguments.update({str(keyword.arg): ast.literal_eval(keyword.value) for keyword in tree.keywords})
    return {"name": tree.func.id, "arguments": arguments}
