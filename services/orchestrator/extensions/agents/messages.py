"""Anthropic's messages as turns of a session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from services.orchestrator.extensions.agents.dialect import (
    Body,
    Dialect,
    chat_turn,
    check_fields,
    event,
    function,
    json_schema,
    listed,
    stops,
    table,
    text,
    tool_choice,
)
from services.orchestrator.extensions.agents.sessions import Session
from services.orchestrator.extensions.environments.recording import Turn, TurnRequest
from shared.errors import BadRequest
from shared.wire import Message

KNOWN = {
    *("messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences"),
    *("thinking", "betas", "context_management", "output_config", "container", "speed"),
}

CHOICES = {"auto": "auto", "none": "none", "any": "required"}

THOUGHTS = ("thinking", "redacted_thinking")

UNREAD = "arguments_as_text"
"""The key that holds the arguments of a call if they are not a JSON object."""


def read(body: Body, _: Session) -> TurnRequest:
    check_fields(body, KNOWN)
    choice = table(body, "tool_choice")
    is_one = bool(choice.get("disable_parallel_tool_use") and body.get("tools"))
    limited = table(body, "output_config").get("format")
    system = text(body.get("system"), "'system'")
    messages = [each for given in listed(body, "messages") for each in _messages(given)]
    return chat_turn(
        messages=[{"role": "system", "content": system}, *messages] if system else messages,
        tools=[_tool(each) for each in listed(body, "tools")],
        tool_choice=tool_choice(choice, CHOICES, "tool"),
        parallel_tool_calls=not is_one,
        json_schema=json_schema(limited, "'output_config.format'"),
        max_tokens=body.get("max_tokens"),
        stop=stops(body, "stop_sequences"),
    )


def _tool(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type", "custom") != "custom":
        raise BadRequest(
            f"a tool is {given!r:.80}; expected one with a name and an input_schema: the tools of "
            "Anthropic's servers are not available"
        )
    return function(given.get("name"), given.get("description"), given.get("input_schema"))


def _messages(given: Any) -> Iterator[Message]:
    """Yields a message in the shape of chat completions. Results of tools come before the text that
    stands beside them."""
    if not isinstance(given, dict):
        raise BadRequest(f"a message is {given!r:.80}; expected an object")
    role, content = given.get("role"), given.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    blocks: list[Any] = content if isinstance(content, list) else [content]
    said, calls = list[str](), list[dict[str, Any]]()
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            result = text(block.get("content"), "the 'content' of a tool_result")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "text":
            said.append(text(block.get("text"), "the 'text' of a block"))
        elif kind not in THOUGHTS:
            raise BadRequest(
                f"a block of type {kind!r} in a message; expected text, tool_use or tool_result: a "
                "session records text only"
            )
    if said or calls:
        with_calls = {"tool_calls": calls} if calls else {}
        yield {"role": role, "content": "".join(said), **with_calls}


def _call(block: Any) -> dict[str, Any]:
    given = block.get("input")
    is_text = isinstance(given, dict) and given.keys() == {UNREAD}
    arguments = given[UNREAD] if is_text else json.dumps(given or {})
    called = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": called}


def answer_body(answer: Turn, asked: Body) -> dict[str, Any]:
    """Returns the message."""
    rollout, said = answer.rollout, answer.message.get("content")
    calls = [_tool_use(call) for call in answer.tool_calls]
    blocks = [{"type": "text", "text": said}] if said else []
    reason = "max_tokens" if rollout.finish_reason == "length" else "end_turn"
    return {
        "id": answer.id,
        "type": "message",
        "role": "assistant",
        "model": str(asked.get("model") or "policy"),
        "content": [*blocks, *calls],
        "stop_reason": "tool_use" if calls else reason,
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(answer.prompt_token_ids),
            "output_tokens": len(rollout.token_ids),
        },
    }


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        given = json.loads(arguments)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        given = {UNREAD: arguments}
    return {"type": "tool_use", "id": call["id"], "name": name, "input": given}


def stream(answer: Turn, asked: Body) -> str:
    """Returns the message as Anthropic's events."""
    return "".join(event(each, each["type"]) for each in _events(answer_body(answer, asked)))


def _events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    blocks, usage = whole["content"], whole["usage"]
    begun = {"content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": {**whole, **begun}}
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            given = json.dumps(block["input"])
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": given}
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}


MESSAGES = Dialect("/v1/messages", read, answer_body, stream)
