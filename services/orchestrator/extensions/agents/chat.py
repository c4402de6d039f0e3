"""OpenAI's chat completions, and completions, as turns of a session; and vLLM's route for token
ids, `/inference/v1/generate`, whose client renders prompts and parses answers itself: a turn
continues from the recorded turn whose tokens its prompt begins with."""

from __future__ import annotations

from dataclasses import replace
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
    logprobs_of,
    parallel_calls,
    stops,
    table,
    tool_choice,
    usage_of,
)
from services.orchestrator.extensions.agents.sessions import Session
from services.orchestrator.extensions.environments.recording import Turn, TurnRequest, digest
from shared.errors import BadRequest

OF_CHAT = {
    *("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort"),
    *("max_tokens", "max_completion_tokens", "stop", "stop_token_ids"),
    *("parallel_tool_calls", "response_format"),
}

CHOICES = {name: name for name in ("auto", "none", "required")}
"""OpenAI's names for a choice of tools."""

OF_COMPLETIONS = {"prompt", "max_tokens", "stop", "stop_token_ids"}


def read_chat(body: Body, _: Session) -> TurnRequest:
    check_fields(body, OF_CHAT)
    args = dict(table(body, "chat_template_kwargs"))
    if (effort := body.get("reasoning_effort")) is not None:
        args["reasoning_effort"] = effort
    most = body.get("max_completion_tokens")
    return chat_turn(
        messages=[_message(each) for each in listed(body, "messages")],
        tools=[_tool(each) for each in listed(body, "tools")],
        tool_choice=tool_choice(body.get("tool_choice"), CHOICES, "function"),
        parallel_tool_calls=parallel_calls(body),
        json_schema=json_schema(body.get("response_format"), "'response_format'"),
        chat_template_kwargs=args,
        max_tokens=body.get("max_tokens") if most is None else most,
        stop=stops(body),
        stop_token_ids=body.get("stop_token_ids"),
    )


def _message(given: Any) -> Any:
    """Returns the message without empty fields. Templates know "system", but not "developer"."""
    if not isinstance(given, dict):
        return given
    said = {name: value for name, value in given.items() if value not in (None, [])}
    return {**said, "role": "system"} if given.get("role") == "developer" else said


def _tool(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type", "function") != "function":
        raise BadRequest(f"a tool is {given!r:.80}; expected one of type 'function'")
    said = table(given, "function")
    return function(said.get("name"), said.get("description"), said.get("parameters"))


def chat_body(answer: Turn, asked: Body) -> dict[str, Any]:
    """Returns the chat completion."""
    calls, choice = answer.tool_calls, _choice(answer, asked)
    message = {"role": "assistant", "content": answer.message.get("content") or None}
    if calls:
        message["tool_calls"] = calls
    else:
        message["content"] = message["content"] or ""
    choice |= {
        "message": message,
        "finish_reason": "tool_calls" if calls else answer.rollout.finish_reason,
        "logprobs": {"content": logprobs_of(answer)} if asked.get("logprobs") else None,
    }
    return {**_head(answer, asked, "chat.completion"), "choices": [choice]}


def _choice(answer: Turn, asked: Body) -> dict[str, Any]:
    ids = {"token_ids": list(answer.rollout.token_ids)} if asked.get("return_token_ids") else {}
    return {"index": 0, **ids}


def _head(answer: Turn, asked: Body, kind: str) -> dict[str, Any]:
    with_ids = bool(asked.get("return_token_ids"))
    return {
        "id": answer.id,
        "object": kind,
        "created": answer.created,
        "model": str(asked.get("model") or "policy"),
        "usage": usage_of(answer),
        **({"prompt_token_ids": list(answer.prompt_token_ids)} if with_ids else {}),
    }


def stream_chat(answer: Turn, asked: Body) -> str:
    """Returns the chat completion in chunks: the message, its finish reason, and the usage if
    requested."""
    whole = chat_body(answer, asked)
    (choice,) = whole["choices"]
    delta = {name: value for name, value in choice.pop("message").items() if value is not None}
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    said = {**choice, "delta": delta, "finish_reason": None}
    ended = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    return _chunks(whole, "chat.completion.chunk", [said, ended], asked)


def _chunks(whole: dict[str, Any], kind: str, choices: list[dict[str, Any]], asked: Body) -> str:
    usage = whole.pop("usage")
    first = {**whole, "object": kind}
    others = {name: value for name, value in first.items() if name != "prompt_token_ids"}
    chunks = [
        {**(others if number else first), "choices": [choice]}
        for number, choice in enumerate(choices)
    ]
    if table(asked, "stream_options").get("include_usage"):
        chunks.append({**others, "choices": [], "usage": usage})
    return "".join(map(event, (*chunks, "[DONE]")))


def read_completion(body: Body, _: Session) -> TurnRequest:
    check_fields(body, OF_COMPLETIONS)
    return given_turn(body.get("prompt"), "prompt", body)


def given_turn(prompt: Any, name: str, limits: Body) -> TurnRequest:
    """Returns the turn of a text or of token ids, unchanged."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    listed: list[Any] = prompt if isinstance(prompt, list) else []
    ids = tuple(listed) if all(_is_token_id(id) for id in listed) else ()
    if not prompt or not (isinstance(prompt, str) or ids):
        raise BadRequest(f"{name!r} is {prompt!r:.80}; expected one text, or the token ids of one")
    limited = chat_turn(  # checks the limits
        messages=[{"role": "user"}],
        max_tokens=limits.get("max_tokens"),
        stop=stops(limits),
        stop_token_ids=limits.get("stop_token_ids"),
    )
    given = {"token_ids": ids} if ids else {"text": prompt}
    return replace(limited, name=digest(f"{prompt}{limited.name}"), messages=(), **given)


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def completion_body(answer: Turn, asked: Body) -> dict[str, Any]:
    """Returns the completion of a text."""
    logprobs = None
    if asked.get("logprobs") is not None:
        found = logprobs_of(answer)
        logprobs = {
            "tokens": [each["token"] for each in found],
            "token_logprobs": [each["logprob"] for each in found],
            "top_logprobs": None,
            "text_offset": [],
        }
    choice = {
        **_choice(answer, asked),
        "text": answer.rollout.text,
        "finish_reason": answer.rollout.finish_reason,
        "logprobs": logprobs,
    }
    return {**_head(answer, asked, "text_completion"), "choices": [choice]}


def stream_completion(answer: Turn, asked: Body) -> str:
    whole = completion_body(answer, asked)
    return _chunks(whole, "text_completion", whole["choices"], asked)


CHAT = Dialect("/v1/chat/completions", read_chat, chat_body, stream_chat)
COMPLETIONS = Dialect("/v1/completions", read_completion, completion_body, stream_completion)


OF_TOKENS = {"token_ids", "sampling_params"}

OF_SAMPLING = {"max_tokens", "stop", "stop_token_ids", "detokenize", "include_stop_str_in_output"}


def read_tokens(body: Body, _: Session) -> TurnRequest:
    check_fields(body, OF_TOKENS)
    params = table(body, "sampling_params")
    check_fields(params, OF_SAMPLING)
    return given_turn(listed(body, "token_ids"), "token_ids", params)


def tokens_body(answer: Turn, asked: Body) -> dict[str, Any]:
    """Returns the answer in vLLM's form, always with log-probs."""
    content = [{**each, "top_logprobs": []} for each in logprobs_of(answer)]
    choice = {
        "index": 0,
        "token_ids": list(answer.rollout.token_ids),
        "finish_reason": answer.rollout.finish_reason,
        "logprobs": {"content": content},
    }
    return {
        "request_id": str(asked.get("request_id") or answer.id),
        "choices": [choice],
        "prompt_token_ids": list(answer.prompt_token_ids),
        "usage": usage_of(answer),
    }


def stream_tokens(answer: Turn, asked: Body) -> str:
    return event(tokens_body(answer, asked)) + event("[DONE]")


TOKENS = Dialect("/inference/v1/generate", read_tokens, tokens_body, stream_tokens)
