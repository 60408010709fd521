"""BFCL's multi-turn back ends as an MCP server on stdio: the tools are those of the entry that began last.

Run by path with the Python of the `bfcl` family. `_begin` and `_offer` are for the environment and not listed.
"""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import bfcl_eval
from bfcl_eval.constants import executable_backend_config as backends
from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, TextContent, Tool

DOCS = Path(bfcl_eval.__file__).parent / "data" / "multi_turn_func_doc"
TYPES = {"dict": "object", "float": "number", "tuple": "array"}  # BFCL's names, and JSON schema's


class BackEnds(MCPServer):  # type: ignore[misc]  # its package is not in our own Python
    def __init__(self) -> None:
        super().__init__("bfcl")
        self._instances: dict[str, Any] = {}
        self._tools: dict[str, tuple[Any, Tool]] = {}
        self._later: set[str] = set()  # not offered yet

    async def list_tools(self) -> list[Tool]:
        return [tool for name, (_, tool) in self._tools.items() if name not in self._later]

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> CallToolResult:
        if name == "_begin":
            self._begin(**arguments)
            return _result("ready")
        if name == "_offer":
            self._later -= set(arguments["names"])
            return _result("ready")
        if name not in self._tools or name in self._later:
            return _result(f"There is no tool {name!r}.", error=True)
        try:
            answer = getattr(self._tools[name][0], name)(**arguments)
        except Exception as raised:  # the agent sees what is wrong with its arguments
            return _result(f"Error during execution: {raised}", error=True)
        return _result(answer if isinstance(answer, str) else json.dumps(answer, default=str))

    def _begin(
        self, classes: list[str], config: dict[str, Any], long_context: bool, without: list[str], later: list[str]
    ) -> None:
        self._tools, self._later = {}, set(later)
        for name in classes:
            instance = getattr(importlib.import_module(backends.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in backends.STATELESS_CLASSES:
                instance._load_scenario(copy.deepcopy(config.get(name, {})), long_context=long_context)
            for line in (DOCS / backends.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]).read_text().splitlines():
                about = json.loads(line)
                if about["name"] not in without:
                    schema = _schema(about["parameters"])
                    tool = Tool(name=about["name"], description=about["description"], input_schema=schema)
                    self._tools[about["name"]] = (instance, tool)


def _result(text: str, error: bool = False) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=error)


def _schema(value: Any) -> Any:
    if isinstance(value, list):
        return [_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    known = {key: _schema(item) for key, item in value.items()}
    if isinstance(value.get("type"), str):
        known["type"] = TYPES.get(value["type"], value["type"])
    return known


if __name__ == "__main__":
    BackEnds().run("stdio")
