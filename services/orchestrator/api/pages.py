"""Pages of lists in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from shared.errors import BadRequest


class HasId(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=HasId)


def page_of(things: Sequence[T], after: str | None, limit: int) -> tuple[Sequence[T], bool]:
    """Returns up to `limit` of what comes after the one with the id `after`, and whether there is
    more. Raises BadRequest for an id that is not there."""
    ids = [thing.id for thing in things]
    if after is not None and after not in ids:
        raise BadRequest(f"after is {after!r}; expected an id of the list")
    start = 0 if after is None else ids.index(after) + 1
    return things[start : start + limit], len(things) > start + limit
