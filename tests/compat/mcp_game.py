"""A tool of the package `mcp`, served by the package itself over streamable HTTP on the port that
is given: a number from 0 to 31 that is always the same."""

from __future__ import annotations

import sys

from mcp.server import MCPServer

SECRET = 13

server = MCPServer("game")


@server.tool()
def guess(number: int) -> str:
    """Guesses the number."""
    return "correct" if number == SECRET else "higher" if number < SECRET else "lower"


if __name__ == "__main__":
    server.run("streamable-http", port=int(sys.argv[1]))
