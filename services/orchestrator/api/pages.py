"""Pages of lists in OpenAI's shape, and the filter by metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Request

from shared.errors import BadRequest


class HasId(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=HasId)

METADATA: dict[str, Any] = {
    "parameters": [
        {
            "name": "metadata",
            "in": "query",
            "style": "deepObject",
            "explode": True,
            "description": "metadata[name]=value leaves only jobs that have it",
            "schema": {"type": "object", "additionalProperties": {"type": "string"}},
            "example": {"team": "math"},
        }
    ]
}
"""The OpenAPI parameter that `metadata_of` reads, for lists of jobs."""


def page_of(things: Sequence[T], after: str | None, limit: int) -> tuple[Sequence[T], bool]:
    """Returns up to `limit` things after the one with the id `after`, and whether there are more.
    Raises BadRequest for an unknown id."""
    ids = [thing.id for thing in things]
    if after is not None and after not in ids:
        raise BadRequest(f"after is {after!r}; expected an id of the list")
    start = 0 if after is None else ids.index(after) + 1
    return things[start : start + limit], len(things) > start + limit


def metadata_of(request: Request) -> dict[str, str] | None:
    """Returns the names and values of `metadata[name]=value`, which may come several times; None
    for `metadata=null`."""
    given = request.query_params.get("metadata")
    if given not in (None, "null"):
        raise BadRequest(f"'metadata': got {given!r}; expected metadata[name]=value, or null")
    if given:
        return None
    return {
        name.removeprefix("metadata[").removesuffix("]"): value
        for name, value in request.query_params.items()
        if name.startswith("metadata[")
    }
