"""Chat messages in a normal form: for jobs, supervised data, sessions, and the sampler's own
routes, so that the same messages are the same prompt everywhere. `check_schema` bounds the JSON
Schemas that constrain an agent's answer, so that an engine compiles each within seconds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from shared.wire.base import Message

TEXT_TYPES = ("text", "input_text", "output_text")
"""The types of the parts that are text, in OpenAI's APIs."""


def normalized(messages: Iterable[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Returns the messages with `content` that is text, or None: its parts are joined. Other keys
    that are None, and a list of no calls, are left out, because templates test whether a message
    has them. Raises ValueError naming the message and the part that is not text."""
    return tuple(normalized_one(each, f"message {index}") for index, each in enumerate(messages))


def normalized_one(message: Mapping[str, Any], name: str) -> Message:
    """As `normalized`, of one message, called `name` in errors."""
    found = {key: value for key, value in message.items() if value is not None or key == "content"}
    if found.get("content") is not None:
        found["content"] = _text(found["content"], name)
    if found.get("tool_calls") == []:
        del found["tool_calls"]
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_without_none(call) for call in cast(list[Any], calls)]
    return found


def for_template(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Returns the messages normalized, as vLLM gives them to a chat template: each has `content`
    that is text, and the arguments of an assistant's calls are objects, because templates iterate
    over them or write them as JSON. Raises ValueError as `normalized`, and for arguments that are
    neither an object nor the JSON text of one."""
    return [
        {
            **message,
            "content": message.get("content") or "",
            **_parsed_calls(message, f"message {index}"),
        }
        for index, message in enumerate(normalized(messages))
    ]


def for_openai(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Returns the messages normalized, with the arguments of calls as JSON text, as OpenAI's API
    has them. Raises ValueError as `normalized`."""
    return [{**message, **_written_calls(message)} for message in normalized(messages)]


def without_arrow_nones(value: Any) -> Any:
    """Returns a value of a table with its chat messages as they were before Arrow, which adds the
    keys of all other structs of a column to each, with None."""
    if isinstance(value, list):
        return [without_arrow_nones(each) for each in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    table = cast(dict[str, Any], value)
    if isinstance(table.get("role"), str):
        return _without_none(table, deep=True)
    return {key: without_arrow_nones(each) for key, each in table.items()}


def _text(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"the 'content' of {name} is {content!r:.80}; expected text")
    parts = cast(list[Any], content)
    where = f"of the 'content' of {name}"
    return "".join(_part(part, f"part {at} {where}") for at, part in enumerate(parts))


def _part(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    given: dict[str, Any] = cast(dict[str, Any], part) if isinstance(part, dict) else {}
    kind, text = given.get("type") or "text", given.get("text")
    if kind in TEXT_TYPES and isinstance(text, str):
        return text
    what = f"of type {kind!r}" if kind not in TEXT_TYPES else f"{part!r:.80}"
    raise ValueError(
        f"{name} is {what}; expected parts of type 'text', with a 'text': the models read only text"
    )


def _without_none(value: Any, *, deep: bool = False) -> Any:
    """Returns an object without keys that are None; in a call also without such keys of its
    function. A None in arguments may be intended, and is kept unless `deep`."""
    if isinstance(value, list):
        return [_without_none(each, deep=deep) for each in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_none(each, deep=deep) if deep or key == "function" else each
        for key, each in cast(dict[str, Any], value).items()
        if each is not None
    }


def _parsed_calls(message: Mapping[str, Any], name: str) -> Message:
    if message.get("role") != "assistant" or not message.get("tool_calls"):
        return {}
    calls = _calls(message)
    return {"tool_calls": [_parsed(call, f"call {at} of {name}") for at, call in enumerate(calls)]}


def _parsed(call: Any, name: str) -> Any:
    function = _function(call)
    if function is None:
        return call
    given: Any = function.get("arguments") or {}
    try:
        arguments: Any = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(
            f"the 'arguments' of {name} are {given!r:.80}; expected an object, or the JSON text of "
            "one"
        )
    return _with_arguments(call, function, arguments)


def _written_calls(message: Mapping[str, Any]) -> Message:
    calls = _calls(message)
    return {"tool_calls": [_written(call) for call in calls]} if calls else {}


def _written(call: Any) -> Any:
    function = _function(call)
    if function is None or isinstance(function.get("arguments"), str):
        return call
    return _with_arguments(call, function, json.dumps(function.get("arguments") or {}))


def _with_arguments(call: Message, function: Message, arguments: Any) -> Message:
    return {**call, "function": {**function, "arguments": arguments}}


def _calls(message: Mapping[str, Any]) -> Sequence[Any]:
    calls = message.get("tool_calls")
    return cast(list[Any], calls) if isinstance(calls, list) else ()


def _function(call: Any) -> dict[str, Any] | None:
    function = cast(dict[str, Any], call).get("function") if isinstance(call, dict) else None
    return cast(dict[str, Any], function) if isinstance(function, dict) else None


# --- JSON Schemas of answers ---------------------------------------------------------------------

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 32
MAX_SCHEMA_COUNT = 100
"""Largest `maxLength` or similar count. Each of its values is a state of the grammar, with a mask
over the vocabulary: 100 take 2.3 s of processor time with 49,000 tokens."""

MAX_SCHEMA_COUNTS = 1000
"""Largest sum of such counts in a schema."""

MAX_SCHEMA_PROPERTIES = 100
MAX_PATTERN_CHARS = 200

SCHEMA_COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
)
COUNTED_REPETITION = re.compile(r"\{\s*\d*\s*,?\s*\d*\s*\}")
"""A counted repetition in a regular expression."""


def check_schema(schema: Any, where: str) -> None:
    """Raises ValueError for a schema that is too large, too deep, or has counts or regular
    expressions that could become large when they are compiled."""
    size = len(json.dumps(schema))
    if size > MAX_SCHEMA_BYTES:
        raise ValueError(f"{where} has {size} bytes as JSON, expected at most {MAX_SCHEMA_BYTES}")
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    total = 0.0
    while waiting:
        node, depth = waiting.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise ValueError(f"{where} is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        if isinstance(node, dict):
            fields = cast(dict[str, Any], node)
            total += _check_keywords(fields, where)
            node = list(fields.values())
        if isinstance(node, list):
            waiting += [(each, depth + 1) for each in cast(list[Any], node)]
    if total > MAX_SCHEMA_COUNTS:
        raise ValueError(
            f"{where} has lengths and counts (maxLength and the like) of {total:g} together, "
            f"expected at most {MAX_SCHEMA_COUNTS}"
        )


def _check_keywords(node: dict[str, Any], where: str) -> float:
    """Returns the sum of the node's lengths and counts."""
    counts = {name: node[name] for name in SCHEMA_COUNTS & node.keys()}
    counts = {name: count for name, count in counts.items() if isinstance(count, int | float)}
    for name, count in counts.items():
        if count > MAX_SCHEMA_COUNT:
            raise ValueError(f"{where} has {name} {count}, expected at most {MAX_SCHEMA_COUNT}")
    properties = _table_of(node, "properties")
    if len(properties) > MAX_SCHEMA_PROPERTIES:
        raise ValueError(
            f"{where} has {len(properties)} properties, expected at most {MAX_SCHEMA_PROPERTIES}"
        )
    patterns: list[Any] = [node.get("pattern"), *_table_of(node, "patternProperties")]
    for pattern in patterns:
        if not isinstance(pattern, str):
            continue
        if len(pattern) > MAX_PATTERN_CHARS:
            raise ValueError(
                f"{where} has a pattern of {len(pattern)} characters, expected at most "
                f"{MAX_PATTERN_CHARS}"
            )
        if found := COUNTED_REPETITION.search(pattern):
            raise ValueError(
                f"{where} has the pattern {pattern!r:.80} with the counted repetition "
                f"{found[0]!r}, expected none: it may become large when compiled"
            )
    return sum(count for count in counts.values() if count > 0)


def _table_of(node: dict[str, Any], name: str) -> dict[str, Any]:
    found = node.get(name)
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}
