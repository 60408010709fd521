"""The tools of an MCP server as an environment: the policy calls them in its own format, and a job decides the reward.

Needs no package: servers are commands, in whatever Python or language, or URLs.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass
from string import Template
from typing import Any, Protocol

from rollart.core.foreign import parse_json_at
from rollart.envs.adapters import instance
from rollart.envs.adapters.mcp_client import McpClient, McpHttp, McpRefused, McpStdio
from rollart.envs.tools import plain_tool

MAX_MISSES = 200  # braces that begin no JSON, before the rest of a text is not searched
RULES = "An answer without a call of a tool goes to the user."
MORE = "There are more tools:\n"


@dataclass(frozen=True)
class McpCall:
    """`round` counts the user's messages, from 0."""

    name: str
    arguments: dict[str, Any]
    answer: str
    round: int


class Job(Protocol):
    """What to do with the tools, and how well it was done. Constructed once, used for one episode after another."""

    def begin(self, client: McpClient, seed: int) -> str:
        """Set the server's initial state; returns the first user message. Even seeds train, odd ones are held out."""
        ...

    def follow(self, answer: str) -> str | None:
        """The next user message; None: the episode is over. New tools of the server are shown to the agent with it."""
        ...

    def score(self, client: McpClient, calls: list[McpCall], answer: str) -> float:
        """1 is success."""
        ...


class McpTools:
    """`command` starts a server, or `url` is where one runs. `job` is `module:Class`, made with `job_args`. An episode
    ends after `max_calls` calls, and is scored as it is. `$NAME` in the values of `environment` (of the server) and
    `headers` is the variable of that name, which the task's `pass_env` names."""

    reusable = True

    def __init__(
        self,
        job: str,
        job_args: dict[str, Any] | None = None,
        *,
        command: list[str] | None = None,
        url: str | None = None,
        environment: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        max_calls: int = 30,
        seconds: float = 8.0,
        held_out: bool = False,
    ) -> None:
        if (command is None) == (url is None):
            raise ValueError("McpTools needs either `command` (of a server to start) or `url` (of one that runs)")
        module, _, name = job.partition(":")
        self.job: Job = getattr(importlib.import_module(module), name)(**(job_args or {}))
        transport = McpStdio(command, _filled(environment)) if command else McpHttp(str(url), _filled(headers))
        self.client = McpClient(transport, seconds)
        self.max_calls, self.held_out = max_calls, held_out
        self.known: dict[str, dict[str, Any]] = {}  # tools by name
        self.calls: list[McpCall] = []
        self.tries = 0  # including unknown tools
        self.round = 0

    def reset(self, seed: int) -> list[dict[str, str]]:
        request = self.job.begin(self.client, instance(seed, self.held_out))
        self.known = {}
        self.calls, self.tries, self.round = [], 0, 0
        declared = json.dumps(self._new_tools(), ensure_ascii=False)
        return [_message("tools", declared), _message("system", RULES), _message("user", request)]

    def step(self, action: str) -> dict[str, Any]:
        calls = parse(action)
        if not calls:
            return self._reply(action)
        calls = calls[: self.max_calls - self.tries]
        self.tries += len(calls)
        results = [self._call(name, arguments) for name, arguments in calls]
        if self.tries >= self.max_calls:
            return self._over(action, truncated=True)
        return {"messages": [_message("tool", result) for result in results], "reward": 0.0, "done": False}

    def close(self) -> None:
        self.client.close()

    def _new_tools(self) -> list[dict[str, Any]]:
        """Descriptions of those that were not listed before."""
        before, self.known = self.known, {tool["name"]: tool for tool in self.client.tools()}
        return [plain_tool(tool) for name, tool in self.known.items() if name not in before]

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        if name not in self.known:  # the server may have others that are not for the agent
            return f"There is no tool {name!r}."
        try:
            answer = self.client.call(name, arguments)
        except McpRefused as error:
            answer = str(error)
        self.calls.append(McpCall(name, arguments, answer, self.round))
        return answer

    def _reply(self, answer: str) -> dict[str, Any]:
        follow = self.job.follow(answer)
        if follow is None:
            return self._over(answer, truncated=False)
        self.round += 1
        added = [json.dumps(tool, ensure_ascii=False) for tool in self._new_tools()]
        offer = MORE + "\n".join(added) + "\n\n" if added else ""
        return {"messages": offer + follow, "reward": 0.0, "done": False}

    def _over(self, answer: str, truncated: bool) -> dict[str, Any]:
        score = float(self.job.score(self.client, self.calls, answer))
        info = {"success": score >= 1.0, "calls": len(self.calls)}
        return {"messages": [], "reward": score, "done": not truncated, "truncated": truncated, "info": info}


def parse(action: str) -> list[tuple[str, dict[str, Any]]]:
    """Every JSON object in the text that is a call, in tags or not: models that do not know tools forget them."""
    found: list[tuple[str, dict[str, Any]]] = []
    at, misses = action.find("{"), 0
    while at >= 0 and misses < MAX_MISSES:
        value, end = parse_json_at(action, at)
        misses += value is None
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            arguments = value.get("arguments", {})
            found.append((value["name"], arguments if isinstance(arguments, dict) else {}))
        at = action.find("{", max(end, at + 1))
    return found


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _filled(values: dict[str, str] | None) -> dict[str, str]:
    """Secrets are not written into a run file; `$$` is a dollar."""
    try:
        return {name: Template(value).substitute(os.environ) for name, value in (values or {}).items()}
    except KeyError as error:
        raise ValueError(f"the variable ${error.args[0]} is not set here; name it in the task's `pass_env`") from None
