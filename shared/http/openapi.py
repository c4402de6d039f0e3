"""The OpenAPI document of a service: each body, result and error is a schema under components."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from shared.errors import KINDS, MEDIA_TYPE, Busy, HoneError
from shared.http import codec
from shared.http.rendering import Made

Responses = dict[int | str, dict[str, Any]]
"""Responses by status, as FastAPI takes them."""

COMPONENT = "#/components/schemas/{model}"

BINARY: dict[str, Any] = {"type": "string", "format": "binary"}
TEXT: dict[str, Any] = {"type": "string"}

LOCATION: dict[str, Any] = {"Location": {"description": "where it is", "schema": TEXT}}


class Fault(BaseModel):
    """One fault in a body: where, and what."""

    pointer: str
    detail: str


class OpenAIError(BaseModel):
    """The error as OpenAI's clients read it."""

    message: str
    type: str
    code: str
    param: None


class Problem(BaseModel):
    """An error, as RFC 9457 has it. Programs read `type` and `code`, people read `detail`."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    errors: tuple[Fault, ...]
    error: OpenAIError


class Accepted(BaseModel):
    """The operation is under way; its result is at the response's Location."""

    operation: str


def parameters(body: type[BaseModel]) -> dict[str, Any]:
    """Returns the fields of a body as query parameters, for a route that takes either."""
    fields = body.model_json_schema()["properties"].items() if body.model_fields else ()
    listed = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in fields
        if "$ref" not in repr(schema)
    ]
    return {"parameters": listed}


def answers(result: Any) -> Responses:
    """Returns the responses of an operation or query with this type of result, as JSON or
    msgpack."""
    if issubclass(result, Made):
        (body,) = result.__pydantic_generic_metadata__["args"]
        return answers(body) | {201: answers(body)[200] | {"headers": LOCATION}}
    return {200: {"model": result, "content": {codec.MSGPACK: {"schema": BINARY}}}}


def accepted() -> Responses:
    """Returns the response to a caller that prefers not to wait for an operation."""
    return {202: {"model": Accepted, "headers": LOCATION}}


def any_answer() -> Responses:
    """Returns the responses of the route that returns the result of any operation."""
    anything: dict[str, Any] = {}
    content = {codec.JSON: {"schema": anything}, codec.MSGPACK: {"schema": BINARY}}
    return {
        200: {"description": "what came of the operation", "content": content},
        201: {"description": "what it made", "content": content, "headers": LOCATION},
        **accepted(),
    }


def without_model(
    description: str, *media_types: str, schema: dict[str, Any] = BINARY
) -> dict[str, Any]:
    """Returns a response without a model."""
    return {
        "description": description,
        "content": {media_type: {"schema": schema} for media_type in media_types},
    }


def problem_responses() -> Responses:
    """Returns the error responses that every route can give."""
    kinds: dict[int | str, list[type[HoneError]]] = {}
    for kind in KINDS:
        kinds.setdefault(kind.status, []).append(kind)
    return {status: _problem_response(several) for status, several in kinds.items()}


def _problem_response(kinds: list[type[HoneError]]) -> dict[str, Any]:
    example = kinds[0]("a sentence that says what was wrong, what was expected, and where")
    content = {
        "schema": {"$ref": COMPONENT.format(model=Problem.__name__)},
        "example": example.problem(),
    }
    seconds = {"description": "seconds until it is worth asking again", "schema": TEXT}
    headers = {"headers": {"Retry-After": seconds}} if Busy in kinds else {}
    titles = " or ".join(kind.title for kind in kinds)
    return {"description": titles, "content": {MEDIA_TYPE: content}, **headers}


def document(app: FastAPI, bodies: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """Returns the document of all routes; `bodies` has the type of the body by path and method."""
    made = get_openapi(
        title=app.title,
        version=app.version,
        routes=app.routes,
        separate_input_output_schemas=False,
    )
    problem = ("", "")
    types = {problem: Problem, **bodies}
    inputs: list[tuple[tuple[str, str], JsonSchemaMode, TypeAdapter[Any]]] = [
        (key, "validation", TypeAdapter(type_)) for key, type_ in types.items()
    ]
    schemas, definitions = TypeAdapter.json_schemas(inputs, ref_template=COMPONENT)
    components = made.setdefault("components", {}).setdefault("schemas", {})
    components.update(definitions.get("$defs", {}))
    for path, method in bodies:
        content = {
            codec.JSON: {"schema": schemas[(path, method), "validation"]},
            codec.MSGPACK: {"schema": BINARY},
        }
        made["paths"][path][method.lower()]["requestBody"] = {"content": content, "required": True}
    return made
