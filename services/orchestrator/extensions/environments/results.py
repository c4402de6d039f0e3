"""What a call of a tool becomes for the model to read."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from shared.wire import ToolCall, ToolResult

MAX_RESULT_CHARS = 32_768
"""Characters of one result, as in the sandbox. The rest is cut off."""


def arguments_of(call: ToolCall, tools: Collection[str]) -> dict[str, Any]:
    """Returns the arguments of a call. Raises ValueError, with a sentence for the model, unless
    they are an object and the tool exists."""
    if call.name not in tools:
        known = ", ".join(tools) or "none"
        raise ValueError(f"There is no tool {call.name!r:.100}; the tools are: {known}.")
    arguments: Any = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"The arguments of {call.name} are not JSON: {error}.") from error
    if not isinstance(arguments, dict):
        shown = f"{json.dumps(arguments)[:100]}, expected a JSON object"
        raise ValueError(f"The arguments of {call.name} are {shown}.")
    return arguments


def result(call: ToolCall, content: str, *, failed: bool = False) -> ToolResult:
    return ToolResult(id=call.id, content=cut(content), failed=failed)


def as_text(value: Any) -> str:
    """Returns text as it is, and anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def of_blocks(blocks: Any) -> str | None:
    """Returns the text of MCP's blocks of content, None for anything else. Blocks that are no text,
    such as images, are named only."""
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        return None
    return "\n".join(str(block.get("text", f"[{block.get('type')}]")) for block in blocks)


def tool_schema(name: str, description: str | None, parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool in OpenAI's shape."""
    function = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def cut(text: str) -> str:
    if len(text) <= MAX_RESULT_CHARS:
        return text
    return f"{text[:MAX_RESULT_CHARS]}... [cut off after {MAX_RESULT_CHARS} of {len(text)}]"
