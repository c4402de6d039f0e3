"""Between HTTP and typed bodies: media types, preferences, problem documents."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from starlette.exceptions import HTTPException
from starlette.routing import Match

from shared.errors import (
    KINDS,
    MEDIA_TYPE,
    BadRequest,
    Busy,
    HoneError,
    Malformed,
    NotFound,
    TooLarge,
    Unavailable,
    from_problem,
)
from shared.explain import nearest, refusal_message
from shared.http import codec

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
P = ParamSpec("P")

MAX_WAIT_S = 60.0

GZIP_BYTES = 1024
"""Smaller answers are sent as they are."""

THREAD_BYTES = 1 << 17
"""Larger answers take more than a millisecond to compress, so a thread does it and other requests
continue."""

READ_BYTES = 1 << 16
"""Larger bodies take milliseconds to read and check, so a thread does it."""

GZIP_LEVEL = 1
"""The fastest. Token ids are mostly zero bits, so higher levels gain little."""


class CreatedResource(BaseModel, Generic[M]):
    """Something that an operation created: `body` is the answer, `location` the new thing's path.
    If the same request created it before (not `is_new`), the answer has status 200."""

    body: M
    location: str
    is_new: bool


async def refuse_unknown_parameters(request: Request) -> None:
    """Raises BadRequest for a query parameter that the route does not have: a misspelt parameter
    would silently be the default. Raises it too for a repeated parameter: no route takes several
    values. `name[key]` counts as `name` if the route declares `name` as a table."""
    if not request.scope["query_string"]:
        return
    route = request.scope["route"]
    known = [field.alias for field in route.dependant.query_params]
    extra: dict[str, Any] = route.openapi_extra or {}
    declared: list[dict[str, Any]] = extra.get("parameters", [])
    tables = [one["name"] for one in declared if one.get("style") == "deepObject"]
    known += [one["name"] for one in declared if one["name"] not in tables]
    times = Counter(name for name, _ in request.query_params.multi_items())
    for name, count in times.items():
        if count > 1 and name not in lists_of(declared):
            raise BadRequest(
                f"parameter {name!r} came {count} times, expected once",
                errors=[{"pointer": f"/query/{name}", "detail": "expected once"}],
            )
        in_table = re.fullmatch(r"([^\[]+)\[.+\]", name)
        if name not in known and not (in_table and in_table[1] in tables):
            help = nearest(name, known, "its parameters") if known else "it takes none"
            raise BadRequest(
                f"unknown parameter {name!r} of {request.method} {route.path_format}; {help}",
                errors=[{"pointer": f"/query/{name}", "detail": help}],
            )


def lists_of(declared: list[dict[str, Any]]) -> set[str]:
    """Returns the names of the declared parameters that may come several times."""
    return {one["name"] for one in declared if one.get("schema", {}).get("type") == "array"}


def body_of_parameters(request: Request, data: bytes) -> bytes:
    """Returns the body, in JSON, whose fields are the request's query parameters. Raises BadRequest
    if there is a body too."""
    if data.strip() not in (b"", b"{}"):
        raise BadRequest("expected a body or query parameters, not both")
    lists = lists_of(request.scope["route"].openapi_extra["parameters"])
    given = request.query_params
    fields = {name: given.getlist(name) if name in lists else given[name] for name in given}
    return json.dumps(fields).encode()


def media_type(request: Request, data: bytes) -> str:
    """Returns the Content-Type of the body `data`. Raises BadRequest for a compressed body, and for
    another type than JSON and msgpack."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise BadRequest(f"Content-Encoding is {encoding!r}; expected an uncompressed body")
    given = request.headers.get("content-type", "").partition(";")[0].strip()
    is_empty = not data and not given
    if given in (codec.JSON, codec.MSGPACK) or is_empty:
        return given or codec.JSON
    raise BadRequest(f"Content-Type is {given!r}; expected {codec.JSON} or {codec.MSGPACK}")


async def body_of(request: Request, most_bytes: int) -> bytes:
    """Returns the body. Raises TooLarge for more than `most_bytes`, which are never held."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            raise TooLarge(
                f"{request.method} {request.url.path} with a body of {size} bytes or more; "
                f"expected at most {most_bytes}"
            )
        parts.append(part)
    return b"".join(parts)


MOST_WEIGHT = "hone_most_weight"
"""The key, in a request's scope, of the most that its body may weigh (`codec.json_weight`)."""


def most_weight(request: Request) -> int | None:
    """Returns the most that the request's body may weigh; None for any."""
    most: int | None = request.scope.get(MOST_WEIGHT)
    return most


async def parse_body(size: int, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns what `read` makes of a body of `size` bytes, if it is large in a thread, so that
    other requests continue."""
    if size <= READ_BYTES:
        return read(*args, **kwargs)
    return await asyncio.to_thread(read, *args, **kwargs)


async def read_body(request: Request, model: type[M]) -> M:
    """Returns the request's body; "{}" for none. Raises BadRequest as `codec.decode`."""
    data = await request.body()
    kind, most = media_type(request, data), most_weight(request)
    return await parse_body(len(data), codec.decode, model, data, kind, most)


async def render(result: BaseModel, request: Request) -> Response:
    """Returns the result in the media type and the encoding that the request accepts. A created
    result has status 201 and its Location."""
    if isinstance(result, CreatedResource):
        made = cast(CreatedResource[BaseModel], result)
        response = await render(made.body, request)
        if made.is_new:
            response.status_code, response.headers["location"] = 201, made.location
        return response
    accepted = request.headers.get("accept", "")
    kind = codec.MSGPACK if codec.MSGPACK in accepted else codec.JSON
    data = codec.encode(result, kind)
    headers: dict[str, str] = {}
    if len(data) >= GZIP_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        in_thread = len(data) >= THREAD_BYTES
        data = await asyncio.to_thread(compress, data) if in_thread else compress(data)
        headers = {"content-encoding": "gzip", "vary": "accept-encoding"}
    return Response(data, media_type=kind, headers=headers)


def compress(data: bytes) -> bytes:
    return gzip.compress(data, GZIP_LEVEL)


def preferred_wait_s(request: Request) -> float | None:
    """Returns the seconds to wait before answering 202; None, for any length, unless the caller
    prefers respond-async."""
    prefer = request.headers.get("prefer", "")
    if "respond-async" not in prefer:
        return None
    wait = re.search(r"wait=(\d+)", prefer)
    return min(float(wait.group(1)), MAX_WAIT_S) if wait else 0.0


def problem(error: HoneError) -> JSONResponse:
    headers: dict[str, str] = {}
    if isinstance(error, Unavailable) and error.retry_after_s:
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, Malformed):
        headers["connection"] = "close"
    return JSONResponse(error.problem(), error.status, headers, media_type=MEDIA_TYPE)


async def answer_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HoneError)
    return problem(error)


async def answer_validation(_request: Request, error: Exception) -> Response:
    """Answers for parameters that FastAPI parses; bodies are parsed by `codec`."""
    assert isinstance(error, RequestValidationError)
    faults = [
        {
            "pointer": "/" + "/".join(map(str, fault["loc"])),
            "detail": refusal_message(str(fault["loc"][-1]), fault),
        }
        for fault in error.errors()
    ]
    return problem(BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults))


async def answer_http(request: Request, error: Exception) -> Response:
    """Answers requests that Starlette itself refuses, such as an unknown route or method."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return problem(NotFound(f"no route {asked}"))
    if error.status_code == 405:
        methods = sorted(_methods_of(request))
        detail = f"no route {asked}; this path has {' and '.join(methods)}"
        document = NotFound(detail).problem() | {"status": 405}
        return JSONResponse(document, 405, {"allow": ", ".join(methods)}, media_type=MEDIA_TYPE)
    document = {"detail": f"{asked}: {error.detail}"}
    refused = from_problem(error.status_code, document, "service").problem()
    return JSONResponse(
        refused | {"status": error.status_code},
        error.status_code,
        error.headers,
        media_type=MEDIA_TYPE,
    )


def _methods_of(request: Request) -> set[str]:
    """Returns the methods that the routes of the request's path have."""
    here = (route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE)
    return {method for route in here for method in route.methods}


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
    if issubclass(result, CreatedResource):
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
