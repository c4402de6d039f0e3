"""The reference of a service's routes, as Markdown from its OpenAPI document."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

Node = dict[str, Any]

JSON = "application/json"
FIRST_ERROR = "4"
BEGINNING = """# REST: {name}

The service describes itself at `/openapi.json`, from which this page is made. What every route can
answer beside its own results is a problem document: [REST in short](commands.md#rest) and
[the contract of every service](architecture.md#the-contract-of-every-service).
"""


def page(name: str, document: Node) -> str:
    """Returns the page: a section for each route, then one for each body."""
    parts = [BEGINNING.format(name=name)]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += [f"## {method.upper()} {path}\n", *_route(name, operation)]
    parts.append("## Bodies\n")
    for title, schema in sorted(document["components"]["schemas"].items()):
        parts += [f"({name}-{title.lower()})=\n### {title}\n", *_body(name, schema)]
    return "\n".join(parts)


def _route(name: str, operation: Node) -> Iterator[str]:
    yield _text(operation) + "\n"
    if parameters := operation.get("parameters"):
        yield "| parameter | in | is | what it says |\n|---|---|---|---|"
        for each in parameters:
            kind = _type(name, each["schema"])
            yield f"| `{each['name']}` | {each['in']} | {kind} | {_cell(each)} |"
        yield ""
    if body := operation.get("requestBody"):
        yield from _content(name, "Takes", body)
    for status, answer in operation["responses"].items():
        if status < FIRST_ERROR:
            yield from _content(name, f"Answers {status}:", answer)


def _content(name: str, what: str, node: Node) -> Iterator[str]:
    content = node.get("content", {})
    if JSON not in content:
        yield f"{what} {' or '.join(f'`{kind}`' for kind in content) or 'nothing'}\n"
        return
    yield f"{what} {_type(name, content[JSON].get('schema', {}))}\n"


def _body(name: str, schema: Node) -> Iterator[str]:
    yield _text(schema) + "\n"
    if "properties" not in schema:
        yield _type(name, schema) + "\n"
        return
    required = schema.get("required", ())
    yield "| field | is | default | what it says |\n|---|---|---|---|"
    for field, told in schema["properties"].items():
        default = "" if field in required else f"`{json.dumps(told.get('default'))}`"
        yield f"| `{field}` | {_type(name, told)} | {_escaped(default)} | {_cell(told)} |"
    yield ""
    for example in schema.get("examples", ()):
        yield f"```json\n{json.dumps(example, indent=2, ensure_ascii=False)}\n```\n"


def _type(name: str, schema: Node) -> str:
    """Returns the type in words; a body is a link to its section."""
    if reference := schema.get("$ref"):
        title = reference.rpartition("/")[2]
        return f"[{title}](#{name}-{title.lower()})"
    if branches := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return " or ".join(_type(name, branch) for branch in branches)
    if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return " or ".join(f"`{json.dumps(choice)}`" for choice in choices)
    if schema.get("type") == "array":
        return f"list of {_type(name, schema.get('items') or {})}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"table of {_type(name, schema['additionalProperties'])}"
    return str(schema.get("format") or schema.get("type", "any value"))


def _text(node: Node) -> str:
    return inspect.cleandoc(node.get("description", ""))


def _cell(node: Node) -> str:
    return _escaped(" ".join(_text(node).split()))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
