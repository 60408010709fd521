"""A client of MCP servers with the standard library alone: tools and resources, over stdio or streamable HTTP.

It speaks the protocol revisions that begin with a handshake, which all current servers support.
Synchronous, one request at a time; every wait has a deadline.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from rollart.core.llm_client import open_url

REVISION = "2025-06-18"
CLIENT = {"name": "rollart", "version": "1"}
END_S = 5.0


class McpError(Exception):
    """The server is gone, late, or refuses; the message says which."""


class McpRefused(McpError):
    """The server replied with an error."""


class McpStdio:
    """A server that we start: one JSON message per line on its stdin and stdout."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **(environment or {})}
            )
        except OSError as error:
            raise McpError(f"the MCP server {command[0]} cannot be started: {error}") from error
        self._rest = b""

    def notify(self, message: dict[str, Any], deadline: float) -> None:
        """Send a message that has no reply."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise McpError(f"the MCP server ended with exit code {self._process.poll()}") from error

    def request(self, message: dict[str, Any], deadline: float) -> Iterator[dict[str, Any]]:
        """Send it and yield the messages that come back, until the caller stops."""
        self.notify(message, deadline)
        while True:
            yield json.loads(self._line(deadline))

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise McpError("the MCP server did not reply in time")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise McpError(f"the MCP server ended with exit code {self._process.wait(END_S)}")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # the signal to end
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class McpHttp:
    """A server at a URL, which replies with one JSON object or a stream of events. Same methods as `McpStdio`."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self._url = url
        self._headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
        self._headers.update(headers or {})

    def notify(self, message: dict[str, Any], deadline: float) -> None:
        for _ in self.request(message, deadline):
            pass

    def request(self, message: dict[str, Any], deadline: float) -> Iterator[dict[str, Any]]:
        request = urllib.request.Request(self._url, json.dumps(message).encode(), self._headers)
        try:
            with open_url(request, timeout=max(0.1, deadline - time.monotonic())) as answer:
                if session := answer.headers.get("Mcp-Session-Id"):
                    self._headers["Mcp-Session-Id"] = session
                    self._headers["MCP-Protocol-Version"] = REVISION
                if "text/event-stream" in answer.headers.get("Content-Type", ""):
                    yield from self._events(answer, deadline)
                elif content := answer.read():
                    yield json.loads(content)
        except (OSError, ValueError) as error:
            body = error.read().decode(errors="replace")[:500] if isinstance(error, urllib.error.HTTPError) else ""
            raise McpError(f"the MCP server at {self._url} failed: {error} {body}".rstrip()) from error

    def _events(self, answer: Any, deadline: float) -> Iterator[dict[str, Any]]:
        data: list[str] = []
        for raw in answer:
            if time.monotonic() > deadline:
                raise McpError(f"the MCP server at {self._url} did not reply in time")
            line = raw.decode().rstrip("\r\n")
            if line.startswith("data:"):
                data.append(line[5:].lstrip())
            elif not line and data:
                yield json.loads("\n".join(data))
                data = []

    def close(self) -> None:
        if "Mcp-Session-Id" in self._headers:
            request = urllib.request.Request(self._url, headers=self._headers, method="DELETE")
            try:
                open_url(request, timeout=END_S).close()
            except urllib.error.HTTPError as error:
                if error.code not in (404, 405):  # ended already, or clients cannot end sessions
                    raise


class McpClient:
    """Connects when constructed. `seconds` is the deadline of each request."""

    def __init__(self, transport: McpStdio | McpHttp, seconds: float = 30.0) -> None:
        self._transport = transport
        self._seconds = seconds
        self._last_id = 0
        about = {"protocolVersion": REVISION, "capabilities": {}, "clientInfo": CLIENT}
        self.server = self.request("initialize", about)["serverInfo"]
        message = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        self._transport.notify(message, time.monotonic() + seconds)

    def tools(self) -> list[dict[str, Any]]:
        """Name, description and input schema of each."""
        page = self.request("tools/list", {})
        found: list[dict[str, Any]] = page["tools"]
        while page.get("nextCursor"):
            page = self.request("tools/list", {"cursor": page["nextCursor"]})
            found += page["tools"]
        return found

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text that the tool returns, also if it is an error. Raises McpError if it cannot be called."""
        result = self.request("tools/call", {"name": name, "arguments": arguments})
        parts = [part.get("text", f"({part['type']})") for part in result.get("content", [])]
        return "\n".join(parts)

    def read(self, uri: str) -> str:
        """The text of a resource."""
        result = self.request("resources/read", {"uri": uri})
        return "".join(part.get("text", "") for part in result["contents"])

    def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._last_id += 1
        message = {"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params}
        for answer in self._transport.request(message, time.monotonic() + self._seconds):
            if answer.get("id") != self._last_id or "method" in answer:
                continue  # a notification, or a request to the client, which offers nothing
            if "error" in answer:
                raise McpRefused(f"`{method}` was refused: {answer['error'].get('message')}")
            result: dict[str, Any] = answer["result"]
            return result
        raise McpError(f"the MCP server closed its reply to `{method}`")

    def close(self) -> None:
        self._transport.close()
