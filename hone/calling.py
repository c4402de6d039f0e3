"""How the calls to an orchestrator are made, and what callers gave is checked: one request, and the
events of a job. `shared/http/client.py` has the deadlines and retries."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import urlencode

from pydantic import BaseModel, ValidationError

from shared import wire
from shared.errors import BadRequest, Failed, NotFound, Unavailable, no_job
from shared.explain import elide, sentences
from shared.http import client as shared_client
from shared.http import codec
from shared.http.client import Client
from shared.http.urls import check_url
from shared.job import JOB_ID
from shared.wire import JobStatus

if TYPE_CHECKING:
    from shared.job import Job

URL = "http://127.0.0.1:8000"
PING_DEADLINE_S = 10.0

_VISIBLE = re.compile(r"[!-~]+")

M = TypeVar("M", bound=BaseModel)


class Calls:
    """The calls to the orchestrator at `url`. Raises BadRequest for a wrong URL or token."""

    def __init__(self, url: str, token: str | None) -> None:
        check_text("the orchestrator's URL", url)
        if token is not None:
            check_text("the token", token, secret=True)
        try:
            check_url(url, URL)
        except ValueError as error:
            raise BadRequest(f"the orchestrator's URL: {error}") from error
        self.client = shared_client.Client("orchestrator", url, token=token)
        self._is_known = False

    async def ping(self) -> None:
        await self.client.ping(PING_DEADLINE_S)
        self._is_known = True

    async def get(self, path: str, answer: type[M]) -> M:
        return await self.checked(self.client.get(path, answer))

    async def post(self, path: str, body: BaseModel | None, answer: type[M], **options: Any) -> M:
        """Returns the answer. `options` are as in `shared.http.client.Client.call`."""
        return await self._call("POST", path, body, answer, **options)

    async def delete(self, path: str, answer: type[M], **options: Any) -> M:
        """As `post`, without a body."""
        return await self._call("DELETE", path, None, answer, **options)

    async def _call(self, *ask: Any, deadline_s: float = 30.0, **options: Any) -> Any:
        return await self.checked(self.client.call(*ask, deadline_s=deadline_s, **options))

    async def checked(self, call: Awaitable[M]) -> M:
        """Returns the call's result. If the URL is not an orchestrator's, the error says which
        program answers there."""
        try:
            return await call
        except (BadRequest, Failed):
            if not self._is_known:
                with contextlib.suppress(Unavailable):  # the first error says more
                    await self.ping()
            raise

    async def by_id_or_name(self, job: str, call: Callable[[str], Awaitable[M]]) -> M:
        """Calls with `job` as an id, and if there is none as a name. Reads no record, so a job with
        an unreadable record can still be cancelled and removed."""
        if not isinstance(job, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadRequest(f"the job is {elide(job)}; expected its id or its name")
        if not re.fullmatch(JOB_ID, job):
            raise no_job(job)
        try:
            return await call(job)
        except NotFound:
            query = urlencode({"limit": 1, "name": job})
            page = await self.get(f"/v1/jobs?{query}", wire.JobList)
            ids = [*(summary.id for summary in page.jobs), *page.unreadable]
            if not ids:
                raise
            return await call(max(ids))  # ids of one name sort by time


def job_of(given: Job | Mapping[str, Any]) -> Job:
    """Returns the job; a dict is read like a job file in the working directory. Raises BadRequest
    with a sentence for each fault."""
    from copy import deepcopy

    from shared.job import Job
    from shared.job.file import make_job

    if isinstance(given, Job):
        return given
    if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadRequest(
            f"the job is {elide(given)}; expected a dict, or a Job, which hone.load_job reads from "
            "a file"
        )
    return make_job(deepcopy({**given}), (), "job")


def check_text(what: str, value: Any, *, secret: bool = False) -> None:
    """Raises BadRequest unless `value` is text for a URL or a header. A secret value is not
    shown."""
    if isinstance(value, str) and _VISIBLE.fullmatch(value):
        return
    got = "" if secret else f"got {elide(value)}; "
    raise BadRequest(f"{what}: {got}expected text of visible ASCII characters")


def body_of(kind: type[M], **fields: Any) -> M:
    """Returns the body with these fields. Raises BadRequest with a sentence for each fault."""
    try:
        return kind(**fields)
    except ValidationError as error:
        faults = sentences(error, kind)
        raise BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults) from error


# --- events --------------------------------------------------------------------------------------

RECONNECT_S = 60.0
"""Most seconds without any answer."""

ProgressCallback: TypeAlias = "Callable[[wire.JobProgress], None]"


async def pages(
    client: Client, job_id: str, after: str, progress: ProgressCallback | None = None
) -> AsyncGenerator[wire.Event]:
    """Yields the past events after event `after`; never calls `progress`."""
    following: str | None = after
    while following is not None:
        path = f"/v1/jobs/{job_id}/events?after={following}"
        page = await client.get(path, wire.EventList)
        for event in page:
            yield event
        following = page.next_after


async def follow(
    client: Client, job_id: str, after: str, progress: ProgressCallback | None = None
) -> AsyncGenerator[wire.Event]:
    """Yields past and new events after event `after`. Every two seconds without an event,
    `progress` is called with the job's state, or with a message that the orchestrator does not
    answer."""

    def away(seconds: float) -> None:
        if progress:
            message = f"the orchestrator does not answer, {seconds:.0f} s"
            progress(wire.JobProgress(message=message, time=time.time()))

    query = "until_paused=true&progress=true" if progress else "until_paused=true"
    path = f"/v1/jobs/{job_id}/events?{query}"
    stream = client.follow(path, last_id=after, patience_s=RECONNECT_S, away=away)
    async with contextlib.aclosing(stream):
        async for _, kind, data in stream:
            if kind == "end":
                return
            if kind != "progress":
                yield codec.decode_tolerantly(wire.Event, data.encode())
            elif progress:
                progress(codec.decode_tolerantly(wire.JobProgress, data.encode()))


# --- all paused jobs -----------------------------------------------------------------------------


class ResumeResult(BaseModel):
    """A job that was paused, and its status now; None: `problem` says why it was not resumed."""

    id: str
    status: JobStatus | None = None
    problem: str | None = None
