"""Common parts of the dialects, the APIs that agents call: a request becomes a turn of a session,
and the answer a body in the dialect, whole or as a stream. docs/agents.md lists the fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from services.orchestrator.extensions.agents.sessions import Session
from services.orchestrator.extensions.environments.recording import Turn, TurnRequest
from shared.errors import BadRequest
from shared.explain import closest, sentences
from shared.wire import ChatRequest

Body = Mapping[str, Any]

CHANGES_NOTHING: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "include": ([], ["reasoning.encrypted_content"]),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "prompt_logprobs": (0,),
    "repetition_penalty": (1,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields that a session cannot honour, each with the values by which a client asks for nothing."""

IGNORED = frozenset(
    {
        *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "stream"),
        *("stream_options", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "verbosity", "cache_salt", "priority"),
        *("request_id", "skip_special_tokens", "spaces_between_special_tokens"),
        *("return_tokens_as_token_ids", "return_token_ids", "logprobs"),
    }
)
"""Fields that do not affect the tokens, or that are read separately. Temperature and the like are
the job's: training computes the same distribution again."""

REASONS = {
    "n": "a conversation has one answer per turn; send another request for another answer",
    "top_logprobs": "only the sampled tokens' log-probs are known",
}
EMPTY = (None, [], (), {}, "")
"""Values that count as a missing field."""

PENALTY = "it would change the distribution in a way that training cannot compute again"


@dataclass(frozen=True)
class Dialect:
    """The API below `path`. `read` returns what a body asks for; `body` and `stream` return the
    answer, in full or as server-sent events."""

    path: str
    read: Callable[[Body, Session], TurnRequest]
    body: Callable[[Turn, Body], dict[str, Any]]
    stream: Callable[[Turn, Body], str]


def check_fields(body: Body, known: Iterable[str]) -> None:
    """Raises BadRequest for a field that would change the answer and is not honoured."""
    for name, value in body.items():
        if value is None or name in known or name in IGNORED:
            continue
        neutral = CHANGES_NOTHING.get(name, ())
        if value in neutral:
            continue
        if name in CHANGES_NOTHING:
            why = REASONS.get(name, PENALTY)
            expected = f"; expected {' or '.join(map(json.dumps, neutral))}" if neutral else ""
            raise BadRequest(f"{name!r} is {value!r:.80}{expected}, or no such field: {why}")
        near = closest(name, [*known, *IGNORED])
        hint = f"; did you mean {near!r}?" if near else ""
        raise BadRequest(
            f"{name!r:.80} is {value!r:.80}, and recorded sessions have no such field{hint}"
        )


def chat_turn(**fields: Any) -> TurnRequest:
    """Returns the turn of a conversation. Raises BadRequest for content that is not text."""
    try:
        given = {name: value for name, value in fields.items() if value not in EMPTY}
        request = ChatRequest(**given)
    except ValidationError as error:
        faults = sentences(error, ChatRequest)
        raise BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults) from error
    return Session.asked(request)


def tool_choice(value: Any, names: Mapping[str, str], named: str) -> Any:
    """Returns the choice in the shape of chat completions. `names` maps the dialect's names to
    "auto", "none" and "required", and `named` is the type of a choice that names a tool. Raises
    BadRequest for any other choice."""
    kind = value.get("type") if isinstance(value, dict) else value
    if kind is None:
        return "auto"
    if isinstance(value, dict) and kind == named:
        inner = value.get("function")
        name = (inner if isinstance(inner, dict) else value).get("name")
        return {"type": "function", "function": {"name": name}}
    if not isinstance(kind, str) or kind not in names:
        expected = ", ".join(map(repr, names))
        raise BadRequest(
            f"'tool_choice' is {value!r:.80}; expected one of {expected}, or one of type {named!r} "
            "with the name of a tool"
        )
    return names[kind]


def json_schema(given: Any, where: str) -> dict[str, Any] | None:
    """Returns the JSON Schema of a format, OpenAI's or Anthropic's; None: any text. Raises
    BadRequest for another format."""
    if given is None or given == {} or given == {"type": "text"}:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "json_object":
        return {"type": "object"}
    inner = given.get("json_schema", given) if kind == "json_schema" else None
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict) or not schema:
        raise BadRequest(
            f"{where} is {given!r:.80}; expected a 'type' of 'text', 'json_object', or "
            "'json_schema' with a 'schema' that is an object and not empty"
        )
    return schema


def parallel_calls(body: Body) -> bool:
    """Returns whether an answer may have several calls of tools."""
    return body.get("parallel_tool_calls") is not False or not body.get("tools")


def function(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Returns a tool in the shape of chat completions. `strict` is left out: calls are sampled
    freely. Raises BadRequest for a tool without a name."""
    if not isinstance(name, str) or not name:
        raise BadRequest(f"the name of a tool is {name!r:.80}; expected a text")
    if not isinstance(parameters, dict | None):
        raise BadRequest(
            f"the parameters of the tool {name!r:.80} are {parameters!r:.80}; expected an object, "
            "a JSON Schema"
        )
    said = {"name": name, "description": description, "parameters": parameters}
    given = {key: value for key, value in said.items() if value is not None}
    return {"type": "function", "function": given}


def text(content: Any, where: str) -> str:
    """Returns the text of a content: a string, or parts. Raises BadRequest for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        raise BadRequest(f"{where} is {content!r:.80}; expected text: a session records text only")
    return "".join(part["text"] for part in content)


def listed(body: Body, name: str) -> list[Any]:
    """Returns a field that is a list; [] if it is left out."""
    value = body.get(name)
    if value is not None and not isinstance(value, list):
        raise BadRequest(f"{name!r} is {value!r:.80}; expected a list")
    return value or []


def table(body: Body, name: str) -> dict[str, Any]:
    """Returns a field that is an object; {} if it is left out."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise BadRequest(f"{name!r} is {value!r:.80}; expected an object")
    return value or {}


def stops(body: Body, name: str = "stop") -> tuple[Any, ...]:
    """Returns the strings that end an answer: one, or a list."""
    value = body.get(name)
    return (value,) if isinstance(value, str) else tuple(listed(body, name))


def event(data: Any, name: str | None = None) -> str:
    """Returns a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n"


def logprobs_of(answer: Turn) -> list[dict[str, Any]]:
    """Returns the log-prob of each sampled token, with the token's id in place of its text."""
    rollout = answer.rollout
    return [
        {"token": f"token_id:{id}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for id, logprob in zip(rollout.token_ids, rollout.logprobs, strict=True)
    ]


def usage_of(answer: Turn) -> dict[str, int]:
    prompt, sampled = len(answer.prompt_token_ids), len(answer.rollout.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }
