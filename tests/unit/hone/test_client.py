"""How `hone.Client` finds a job: by its id without reading its record, else by its name."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2 as httpx
import pytest

from hone import Client, Failed, NotFound
from shared import client as shared_client
from shared.errors import HoneError
from shared.wire import JobDeleted, JobList, JobState
from tests.support.job_records import record


def answer(request: httpx.Request) -> httpx.Response:
    """Answers for jobs `demo-1` and, newer, `demo-2`, whose own record cannot be read."""
    try:
        return httpx.Response(200, json=_body(request).model_dump(mode="json"))
    except HoneError as error:
        return httpx.Response(error.status, json=error.problem())


def _body(request: httpx.Request) -> JobList | JobState | JobDeleted:
    path = request.url.path
    if path == "/v1/jobs":
        if request.url.params["name"] != "demo":
            return JobList(jobs=())
        return JobList(jobs=(record("paused"),), unreadable=("demo-2",))
    if not path.startswith("/v1/jobs/demo-2"):
        raise NotFound(f"no job at {path}")
    if request.method == "GET":
        raise Failed("the record of job 'demo-2' cannot be read")
    if request.method == "DELETE":
        return JobDeleted(id="demo-2", files=request.url.params["files"] == "true")
    return JobState(id="demo-2", status="cancelled")


@pytest.fixture
def client() -> Iterator[Client]:
    with Client() as client:
        client._client = shared_client.Client(
            "orchestrator", "http://localhost", transport=httpx.MockTransport(answer)
        )
        yield client


@pytest.mark.parametrize("job", ["demo-2", "demo"])
def test_a_job_that_cannot_be_read_is_cancelled_and_removed(client: Client, job: str) -> None:
    with pytest.raises(Failed, match="cannot be read"):
        client.get(job)
    assert client.cancel(job).status == "cancelled"
    assert client.delete(job, files=True) == JobDeleted(id="demo-2", files=True)


@pytest.mark.parametrize("job", ["", "../x", "demo-2/cancel", "demo-2?files=true", "demo-2\n"])
def test_what_can_be_no_id_is_not_asked_for(client: Client, job: str) -> None:
    with pytest.raises(NotFound, match="`hone ls` lists them"):
        client.delete(job)


def test_a_job_that_nobody_knows_is_not_found(client: Client) -> None:
    with pytest.raises(NotFound, match="no job at /v1/jobs/other"):
        client.cancel("other")
