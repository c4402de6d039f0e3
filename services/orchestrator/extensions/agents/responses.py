"""OpenAI's responses as turns of a session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from services.orchestrator.extensions.agents.chat import CHOICES
from services.orchestrator.extensions.agents.dialect import (
    Body,
    Dialect,
    chat_turn,
    check_fields,
    event,
    function,
    json_schema,
    listed,
    parallel_calls,
    table,
    text,
    tool_choice,
)
from services.orchestrator.extensions.agents.sessions import Session
from services.orchestrator.extensions.environments.recording import Turn, TurnRequest
from shared.errors import BadRequest
from shared.wire import Message

KNOWN = {
    *("input", "instructions", "tools", "tool_choice", "max_output_tokens", "reasoning"),
    *("previous_response_id", "chat_template_kwargs", "client_metadata"),
    *("parallel_tool_calls", "text"),
}


def read(body: Body, session: Session) -> TurnRequest:
    check_fields(body, KNOWN)
    given = body.get("input")
    is_text = isinstance(given, str)
    items = [{"role": "user", "content": given}] if is_text else listed(body, "input")
    if not items and body.get("previous_response_id") is None:
        raise BadRequest(f"'input' is {given!r}; expected a text, or a list of items")
    system = body.get("instructions")
    head: list[Message] = [{"role": "system", "content": system}] if system else []
    args = dict(table(body, "chat_template_kwargs"))
    if effort := table(body, "reasoning").get("effort"):
        args["reasoning_effort"] = effort
    return chat_turn(
        messages=[*head, *_earlier(body, session), *_messages(items)],
        tools=[_tool(each) for each in listed(body, "tools")],
        tool_choice=tool_choice(body.get("tool_choice"), CHOICES, "function"),
        parallel_tool_calls=parallel_calls(body),
        json_schema=json_schema(table(body, "text").get("format"), "'text.format'"),
        chat_template_kwargs=args,
        max_tokens=body.get("max_output_tokens"),
    )


def _earlier(body: Body, session: Session) -> list[Message]:
    """Returns the messages up to an earlier answer. Its instructions are not carried over."""
    if (id := body.get("previous_response_id")) is None:
        return []
    for turn in session.recording.turns:
        if turn.id == id:
            messages = [*turn.asked.messages, turn.message]
            return messages[1:] if messages[0]["role"] == "system" else messages
    raise BadRequest(
        f"'previous_response_id' is {id!r:.80}, which is not an answer of this session"
    )


def _tool(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type") != "function":
        raise BadRequest(
            f"a tool is {given!r:.80}; expected one of type 'function': the tools of OpenAI's "
            "servers are not available"
        )
    return function(given.get("name"), given.get("description"), given.get("parameters"))


def _messages(items: Iterable[Any]) -> list[Message]:
    """Returns the items in the shape of chat completions. Calls belong to the answer before them;
    reasoning is left out."""
    found = list[Message]()
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            said = text(item.get("content"), "the 'content' of an item")
            found.append({"role": role, "content": said})
        elif kind == "function_call":
            answer = _answer(found)
            answer["tool_calls"] = [*(answer.get("tool_calls") or ()), _call(item)]
        elif kind == "function_call_output":
            said = text(item.get("output"), "the 'output' of a call")
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
        elif kind != "reasoning":
            raise BadRequest(
                f"an item of type {kind!r}; expected message, function_call, function_call_output "
                "or reasoning"
            )
    return found


def _answer(found: list[Message]) -> Message:
    """Returns the answer that the next call belongs to."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _call(item: Any) -> dict[str, Any]:
    called = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": called}


def answer_body(answer: Turn, asked: Body) -> dict[str, Any]:
    """Returns the response."""
    is_cut = answer.rollout.finish_reason == "length"
    sampled, prompt = len(answer.rollout.token_ids), len(answer.prompt_token_ids)
    return {
        "id": answer.id,
        "object": "response",
        "created_at": answer.created,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": asked.get("instructions"),
        "metadata": asked.get("metadata") or {},
        "model": str(asked.get("model") or "policy"),
        "output": _output(answer),
        "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
        "previous_response_id": asked.get("previous_response_id"),
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def _output(answer: Turn) -> list[dict[str, Any]]:
    said, calls = answer.message.get("content") or "", answer.tool_calls
    status = "incomplete" if answer.rollout.finish_reason == "length" else "completed"
    found = list[dict[str, Any]]()
    if said or not calls:
        part = {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
        head = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant"}
        found.append({**head, "status": status, "content": [part]})
    for number, call in enumerate(calls):
        head = {"id": f"fc_{answer.id}_{number}", "type": "function_call", "call_id": call["id"]}
        found.append({**head, **call["function"], "status": status})
    return found


def stream(answer: Turn, asked: Body) -> str:
    """Returns the response as OpenAI's events."""
    numbered = enumerate(_events(answer_body(answer, asked)))
    return "".join(
        event({"sequence_number": number, **each}, each["type"]) for number, each in numbered
    )


def _events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    for name in ("created", "in_progress"):
        yield {"type": f"response.{name}", "response": {**begun, "incomplete_details": None}}
    for index, item in enumerate(whole["output"]):
        yield from _item_events(index, item)
    yield {"type": f"response.{whole['status']}", "response": whole}


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    at = {"item_id": item["id"], "output_index": index}
    is_call = item["type"] == "function_call"
    empty = {"status": "in_progress", **({"arguments": ""} if is_call else {"content": []})}
    yield {"type": "response.output_item.added", "output_index": index, "item": {**item, **empty}}
    if is_call:
        arguments, name = item["arguments"], "response.function_call_arguments"
        yield {"type": f"{name}.delta", **at, "delta": arguments}
        yield {"type": f"{name}.done", **at, "arguments": arguments, "name": item["name"]}
    else:
        (part,) = item["content"]
        in_part = {**at, "content_index": 0}
        yield {"type": "response.content_part.added", **in_part, "part": {**part, "text": ""}}
        said = {"type": "response.output_text.delta", **in_part, "delta": part["text"]}
        yield {**said, "logprobs": []}
        said = {"type": "response.output_text.done", **in_part, "text": part["text"]}
        yield {**said, "logprobs": []}
        yield {"type": "response.content_part.done", **in_part, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


RESPONSES = Dialect("/v1/responses", read, answer_body, stream)
