"""The four kinds of failure every service answers with, as RFC 9457 problem documents.

    HoneError
    ├── BadRequest   422  the caller is wrong; sending it again will not help
    │   ├── Unauthorized 401
    │   └── NotFound     404
    ├── Conflict     409  out of order, or the same key with another body
    ├── Unavailable  503  starting, draining or unreachable; the client retries only this one
    │   └── Busy     429  too much is waiting already; the client asks again for as long as its deadline allows
    └── Failed       500  the service itself is broken

A message is one sentence a person can act on: the value, what was expected, and where.
`shared/client.py` turns a problem document back into the same class, so an error crosses any number
of services unchanged.
"""

from __future__ import annotations

from typing import Any, ClassVar

MEDIA_TYPE = "application/problem+json"


class HoneError(Exception):
    """An error with a status and a sentence. `errors` lists `{pointer, detail}` of single faults in
    a body."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "failed"
    title: ClassVar[str] = "Failed"

    def __init__(self, detail: str, *, errors: list[dict[str, str]] | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = errors or []

    def problem(self) -> dict[str, Any]:
        """Returns the RFC 9457 document. Its `error` member has OpenAI's shape, so the `openai`
        client reads it too."""
        return {
            "type": f"urn:hone:{self.kind}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "errors": self.errors,
            "error": {"message": self.detail, "type": self.kind, "code": self.kind, "param": None},
        }


class BadRequest(HoneError):
    status = 422
    kind = "bad-request"
    title = "Bad request"


class Unauthorized(BadRequest):
    status = 401
    kind = "unauthorized"
    title = "Unauthorized"


class NotFound(BadRequest):
    status = 404
    kind = "not-found"
    title = "Not found"


class Conflict(HoneError):
    status = 409
    kind = "conflict"
    title = "Conflict"


class Unavailable(HoneError):
    status = 503
    kind = "unavailable"
    title = "Unavailable"


class Busy(Unavailable):
    status = 429
    kind = "busy"
    title = "Busy"
    retry_after_s: ClassVar[int] = 1


class Failed(HoneError):
    pass


_BY_STATUS: dict[int, type[HoneError]] = {
    c.status: c for c in (BadRequest, Unauthorized, NotFound, Conflict, Unavailable, Busy, Failed)
}


def from_problem(status: int, document: dict[str, Any] | None, source: str) -> HoneError:
    """Returns the error that a response stands for. `source` says who answered, for bodies that say
    nothing."""
    document = document or {}
    detail = document.get("detail") or f"{source} answered {status} without saying why"
    kind = _BY_STATUS.get(status) or (BadRequest if 400 <= status < 500 else Failed)
    return kind(str(detail), errors=document.get("errors") or [])
