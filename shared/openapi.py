"""The OpenAPI document of a service: each body, result and error is a schema under components."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from shared import codec
from shared.errors import KINDS, MEDIA_TYPE

COMPONENT = "#/components/schemas/{model}"


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


def problem_responses() -> dict[int | str, dict[str, Any]]:
    """Returns the responses that every route can give beside its own."""
    titles: dict[int | str, list[str]] = {}
    for kind in KINDS:
        titles.setdefault(kind.status, []).append(kind.title)
    schema = {"$ref": COMPONENT.format(model=Problem.__name__)}
    return {
        status: {"description": " or ".join(names), "content": {MEDIA_TYPE: {"schema": schema}}}
        for status, names in titles.items()
    }


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
        content = {codec.JSON: {"schema": schemas[(path, method), "validation"]}}
        made["paths"][path][method.lower()]["requestBody"] = {"content": content, "required": True}
    return made
