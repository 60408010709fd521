"""A shop as an MCP server, written with the `mcp` package: on stdio or, given a port, over HTTP."""

import json
import sys

from mcp.server.mcpserver import MCPServer

app = MCPServer("shop")
stock = {}


@app.tool()
def put(item: str, count: int) -> str:
    """Put things on the shelf."""
    stock[item] = stock.get(item, 0) + count
    return f"{stock[item]} {item} on the shelf"


@app.tool()
def clear() -> str:
    """Empty the shelf."""
    stock.clear()
    return "the shelf is empty"


@app.resource("shop://stock")
def shelf() -> str:
    return json.dumps(stock)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        app.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        app.run("stdio")
