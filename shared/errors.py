"""The kinds of failure every service answers with, as RFC 9457 problem documents.

    HoneError
    ├── BadRequest   422  the caller is wrong; sending it again will not help
    │   ├── Malformed    400  not valid HTTP; the connection is closed
    │   ├── Unauthorized 401
    │   ├── Forbidden    403
    │   ├── NotFound     404
    │   ├── Gone         410  it existed, and has ended
    │   └── TooLarge     413  more than is allowed here
    ├── Conflict     409  out of order, superseded, or the same key with another body
    ├── StateLost    409  what the call builds on is gone; only loading again helps
    ├── Unavailable  503  starting, draining or unreachable; the client retries only this one
    │   └── Busy     429  too much is waiting already; the client asks again until its deadline
    └── Failed       500  the service itself is broken

Programs tell errors apart by class, and where that is not enough by `code` (`CODES` lists them).
The detail is for people: one sentence with the value, what was expected, and where.
`shared/http/client.py` turns a problem document back into the same class and code, so an error
crosses any number of services unchanged.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:hone:"

CODES = {
    # BadRequest, Malformed, Unauthorized, Forbidden, NotFound, Gone, TooLarge
    "bad_request": "the body, a parameter or a setting is wrong",
    "malformed": "a header came twice or is wrong, or the body did not arrive in time",
    "unauthorized": "the bearer token or the Host header is missing or wrong",
    "forbidden": "the API key does not allow this; use another one, or HONE_TOKEN",
    "not_found": "there is no such route or object",
    "no_operation": "the operation polled for is not known here: the service was restarted since",
    "not_there": "a folder that the job names does not exist on the service's host",
    "too_stale": "weights older than max_staleness allows sampled the group; sample again",
    "foreign": "a proxy or another program answered in place of the service, and refused",
    "gone": "a session that is closed, with its rollout",
    "context_length_exceeded": "a session has no room for another answer; the detail says why",
    "too_large": "more than is allowed; the detail says how much is, or which setting says so",
    # Conflict
    "conflict": "not possible in the present state",
    "body_differs": "the same key came before with another body",
    "stale": "a newer attempt or epoch took over; the caller has to stop",
    "taken": "it has the job of another orchestrator; wait until that has ended, or name another",
    "emptied": "Redis lost the jobs, or is another one; run `hone recover`, or restore its file",
    "out_of_order": "another call has to come first; the detail says which",
    "episode_lost": "the episode cannot continue; the detail says why, and a new one can be opened",
    # StateLost
    "state_lost": "the model or the job is not loaded here (any more); load it again",
    # Unavailable, Busy
    "unavailable": "the service cannot answer at present",
    "unreachable": "no connection, or a proxy answered in place of the service",
    "starting": "the service is starting",
    "draining": "the service is shutting down; its successor will answer",
    "hub_away": "the Hugging Face Hub cannot be reached, and its model is not in the cache here",
    "deadline": "the caller's own deadline passed; the operation may still be under way",
    "busy": "too much is waiting already",
    "wrong_type": "a key in Redis has a value that is not Hone's; the detail says what to do",
    # Failed
    "failed": "the service could not do it",
    "bug": "an unexpected exception; the service's log has the traceback",
    "out_of_memory": "a device ran out of memory",
    "disk_full": "there is no space left to write",
    "run_folder_gone": "someone removed the job's run folder; put it back",
    "not_finite": "a loss or gradient is NaN or infinite; the step changed no weight",
    "not_seen": "the weights' folder does not exist on the sampler's side; publish or mount it",
    "digest_differs": "the weights read are not those published and were not loaded; publish again",
    "not_loaded": "the engine does not hold what it was to load; load again, or another way",
    "not_met": "trainer and sampler do not reach each other this way; send the weights another way",
    "no_adapters": "the engine takes no such adapter; send merged weights",
    "shared": "the weights would replace those under other jobs' adapters",
    "tensors_differ": "the weights are not of the model that serves and were not loaded",
}
"""Every code and what it means. The first of each group is the default of its class."""


class HoneError(Exception):
    """An error with a status, a code and a sentence. `errors` lists `{pointer, detail}` of single
    faults in a body. A class with a `kind` of its own has title and code of the same words."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "failed"
    title: ClassVar[str] = "Failed"
    default_code: ClassVar[str] = "failed"

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            cls.title = cls.kind.replace("-", " ").capitalize()
            cls.default_code = cls.kind.replace("-", "_")

    def __init__(
        self,
        detail: str,
        *,
        code: str | None = None,
        errors: list[dict[str, str]] | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code or self.default_code
        self.errors = errors or []

    def problem(self) -> dict[str, Any]:
        """Returns the RFC 9457 document. Its `error` member has OpenAI's shape, so the `openai`
        client reads it too."""
        return {
            "type": TYPE_PREFIX + self.kind,
            "title": self.title,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            "errors": self.errors,
            "error": {"message": self.detail, "type": self.kind, "code": self.code, "param": None},
        }


class BadRequest(HoneError):
    status = 422
    kind = "bad-request"


class Malformed(BadRequest):
    status = 400
    kind = "malformed"


class Unauthorized(BadRequest):
    status = 401
    kind = "unauthorized"


class Forbidden(BadRequest):
    status = 403
    kind = "forbidden"


class NotFound(BadRequest):
    status = 404
    kind = "not-found"


class Gone(BadRequest):
    status = 410
    kind = "gone"


class TooLarge(BadRequest):
    status = 413
    kind = "too-large"


class Conflict(HoneError):
    status = 409
    kind = "conflict"


class StateLost(HoneError):
    status = 409
    kind = "state-lost"


class Unavailable(HoneError):
    status = 503
    kind = "unavailable"

    def __init__(self, detail: str, *, retry_after_s: int = 0, **how: Any) -> None:
        super().__init__(detail, **how)
        self.retry_after_s = retry_after_s


class Busy(Unavailable):
    status = 429
    kind = "busy"

    def __init__(self, detail: str, *, retry_after_s: int = 1, **how: Any) -> None:
        super().__init__(detail, retry_after_s=retry_after_s, **how)


class Failed(HoneError):
    pass


KINDS: tuple[type[HoneError], ...] = (
    BadRequest,
    Malformed,
    Unauthorized,
    Forbidden,
    NotFound,
    Gone,
    TooLarge,
    Conflict,
    StateLost,
    Unavailable,
    Busy,
    Failed,
)
_BY_TYPE = {TYPE_PREFIX + kind.kind: kind for kind in KINDS}
_BY_STATUS = {kind.status: kind for kind in KINDS if kind is not StateLost}
_OF_A_PROXY = frozenset({303, 408, 500, 502, 503, 504})


def from_problem(status: int, document: dict[str, Any] | None, source: str) -> HoneError:
    """Returns the error of a response: its class comes from the document's `type`, else from its
    status.

    A 5xx without a problem document comes from a proxy or a dying server, so it is Unavailable; 303
    and 408 come from a proxy that waits no longer. Another 4xx without a document has the code
    "foreign". `source` names the service in the detail of responses that have no document.
    """
    document = document or {}
    type_ = str(document.get("type", ""))
    is_ours = type_.startswith(TYPE_PREFIX)
    detail = str(document.get("detail") or f"{source} answered {status} without saying why")
    if status in _OF_A_PROXY and not is_ours:
        return Unavailable(detail, code="unreachable")
    by_status = _BY_STATUS.get(status) or (BadRequest if 400 <= status < 500 else Failed)
    kind = _BY_TYPE.get(type_, by_status)
    code, errors = document.get("code"), document.get("errors")
    if not is_ours and issubclass(kind, BadRequest):
        code = "foreign"
    return kind(
        detail,
        code=code if isinstance(code, str) else None,
        errors=cast(list[dict[str, str]], errors) if isinstance(errors, list) else None,
    )


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or its class if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def no_job(job: str) -> NotFound:
    """Returns the error of a job that is missing."""
    return NotFound(f"no job {job!r}; `hone ls` or GET /v1/jobs lists them")


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra of pyproject.toml. pip takes the Hone that is
    installed, so the extra needs no package index that has Hone."""
    return (
        "`make setup` in Hone's repository installs it into .venv, `pip install "
        f"'hone-rl[{extra}]'` into another environment that has Hone"
    )
