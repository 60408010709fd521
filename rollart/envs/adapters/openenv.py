"""Environments behind a server that speaks OpenEnv: one session each, over its WebSocket. Needs no package.

Actions are typed. If the server's schema has one field, the text is its value; otherwise it must contain JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

from rollart.core.foreign import parse_json_at
from rollart.core.llm_client import open_url
from rollart.envs.adapters import instance
from rollart.envs.adapters.websocket import WebSocket

NUMBER = re.compile(r"[-+]?\d+\.?\d*")
NOT_SHOWN = ("done", "reward", "metadata")


class OpenEnv:
    """`field` of the action gets the text, if there are several; `shown` is the field of the observation that is shown,
    by default all. `options` are sent with every reset. Success is a last reward of at least `success`."""

    reusable = True

    def __init__(
        self,
        url: str,
        *,
        field: str | None = None,
        shown: str | None = None,
        options: dict[str, Any] | None = None,
        success: float = 1.0,
        seconds: float = 8.0,
        held_out: bool = False,
    ) -> None:
        base = url.rstrip("/")
        with open_url(f"{base}/schema", timeout=seconds) as answer:
            fields = json.load(answer)["action"].get("properties", {})
        self.fields = {name: about for name, about in fields.items() if name != "metadata"}
        if field is not None and field not in self.fields:
            raise ValueError(f"the actions of {url} have no field {field!r}; they have {', '.join(self.fields)}")
        self.field = field or (next(iter(self.fields)) if len(self.fields) == 1 else None)
        self.shown, self.options, self.success, self.held_out = shown, options or {}, success, held_out
        self._socket = WebSocket(re.sub("^http", "ws", base) + "/ws", seconds)

    def reset(self, seed: int) -> str:
        data = self._request("reset", {**self.options, "seed": instance(seed, self.held_out)})
        return self._text(data["observation"])

    def step(self, action: str) -> dict[str, Any]:
        parsed = self.parse(action)
        if parsed is None:
            return {"messages": self.instruction(), "reward": 0.0, "done": False}
        try:
            data = self._request("step", parsed)
        except InvalidAction as error:
            return {"messages": f"{self.instruction()} ({error})", "reward": 0.0, "done": False}
        reward, done = data.get("reward"), bool(data.get("done"))
        info = {"success": reward is not None and float(reward) >= self.success} if done else {}
        return {"messages": self._text(data["observation"]), "reward": reward, "done": done, "info": info}

    def close(self) -> None:
        self._socket.close()

    def instruction(self) -> str:
        if self.field:
            return f"Answer with the {self.field}, {self.fields[self.field].get('type', 'a value')}."
        return f"Answer with a JSON object of {', '.join(self.fields)}."

    def parse(self, action: str) -> dict[str, Any] | None:
        if self.field is None:
            value, _ = parse_json_at(action, max(action.find("{"), 0))
            return value if isinstance(value, dict) else None
        kind = self.fields[self.field].get("type")
        if kind not in ("integer", "number"):
            return {self.field: action}
        found = NUMBER.findall(action[:10_000])
        if not found or len(found[-1]) > 15:
            return None
        return {self.field: int(float(found[-1])) if kind == "integer" else float(found[-1])}

    def _text(self, observation: dict[str, Any]) -> str:
        if self.shown:
            return str(observation[self.shown])
        shown = {name: value for name, value in observation.items() if name not in NOT_SHOWN}
        if len(shown) == 1:
            return str(next(iter(shown.values())))
        return json.dumps(shown, ensure_ascii=False)

    def _request(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._socket.receive())
        if answer["type"] == "error":
            about = answer["data"]
            if about.get("code") == "VALIDATION_ERROR":
                raise InvalidAction(str(about.get("message"))[:500])
            raise RuntimeError(f"the OpenEnv server failed: {about.get('message')}")
        result: dict[str, Any] = answer["data"]
        return result


class InvalidAction(Exception):
    pass
