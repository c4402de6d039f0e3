"""`hone.Client`: how it finds a job, what it takes and gives back, and what its errors say."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from pydantic import BaseModel

from hone import AsyncClient, BadRequest, Client, Conflict, Failed, NotFound, load_job
from hone.calling import ResumeResult
from shared.errors import HoneError, Unavailable
from shared.http import client as shared_client
from shared.wire import JobDeleted, JobList, JobState, VersionInfo
from tests.support.job_records import record


def answer(request: httpx.Request) -> httpx.Response:
    """Answers for jobs `demo-1` and, newer, `demo-2`, whose own record cannot be read. The
    orchestrator is newer than the client, so there is a field that the client does not know."""
    try:
        body = _body(request).model_dump(mode="json")
        return httpx.Response(200, json=body | {"of_a_newer_version": 1})
    except HoneError as error:
        return httpx.Response(error.status, json=error.problem())


def _body(request: httpx.Request) -> BaseModel:
    path = request.url.path
    if path == "/version":
        return VersionInfo(service="orchestrator", hone="1")
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


@contextlib.contextmanager
def answering(answer: Callable[[httpx.Request], httpx.Response]) -> Iterator[Client]:
    with Client("http://127.0.0.1:8001") as client:
        client._asynchronous._calls.client = shared_client.Client(
            "orchestrator", client.url, transport=httpx.MockTransport(answer)
        )
        yield client


@pytest.fixture
def client() -> Iterator[Client]:
    with answering(answer) as client:
        yield client


@pytest.mark.parametrize("job", ["demo-2", "demo"])
def test_a_job_that_cannot_be_read_is_cancelled_and_removed(client: Client, job: str) -> None:
    with pytest.raises(Failed, match="cannot be read"):
        client.get(job)
    assert client.cancel(job).status == "cancelled"
    assert client.delete(job, files=True) == JobDeleted(id="demo-2", files=True)


@pytest.mark.parametrize("job", ["", "../x", "demo-2/cancel", "demo-2?files=true", "demo-2\n"])
def test_what_can_be_no_id_is_not_asked_for(client: Client, job: str) -> None:
    with pytest.raises(NotFound, match=r"`hone ls` or GET .v1.jobs lists them"):
        client.delete(job)


def test_what_is_no_name_no_time_and_no_change_is_a_sentence(client: Client) -> None:
    nothing: Any = None
    with pytest.raises(BadRequest, match=r"^the job is None; expected its id or its name$"):
        client.get(nothing)
    with pytest.raises(BadRequest, match=r"^timeout_s is -1; expected seconds, from 0 on$"):
        client.wait("demo", timeout_s=-1)
    with pytest.raises(BadRequest, match=r"^the overrides are 'steps=2'; expected a list"):
        client.resume("demo", "steps=2")


def test_what_no_header_and_no_url_can_hold_is_refused_at_once(client: Client) -> None:
    nothing: Any = None
    job = {"name": "x", "model": "m", "steps": 1, "data": {"train": "x"}}
    for key in ("", "a\nb", "ü", 3):
        with pytest.raises(BadRequest, match=r"^the idempotency key: got .*; expected text of"):
            client.submit(job, key=key)  # pyright: ignore[reportArgumentType]
    for token in ("a\nb", "ü", 3):
        with pytest.raises(BadRequest, match=r"^the token: expected text of visible ASCII"):
            Client(token=token)  # pyright: ignore[reportArgumentType]
    for url in (None, b"http://a", "http://a b"):
        with pytest.raises(BadRequest, match=r"^the orchestrator's URL: got .*; expected text"):
            Client(url)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadRequest, match=r"^the key's name: got ''; expected text"):
        client.revoke_key("")
    with pytest.raises(BadRequest, match=r"^metadata is 'a=b'; expected a dict of texts$"):
        client.list(metadata="a=b")  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadRequest, match=r"'rewards': got None; expected a list"):
        client.regrade("demo", 1, 2, nothing)
    with pytest.raises(BadRequest, match=r"^the overrides are None; expected a list"):
        client.resume("demo", nothing)


def test_a_password_in_a_url_is_in_no_error() -> None:
    with Client("http://me:s3cret@127.0.0.1:9") as client:
        with pytest.raises(Unavailable) as error:
            client.ping()
        assert "at http://***@127.0.0.1:9: " in error.value.detail
    with pytest.raises(BadRequest, match=r"http://\*\*\*@host:99999' is no URL: port 99999"):
        Client("http://me:s3cret@host:99999")


def test_a_job_that_no_one_knows_is_not_found(client: Client) -> None:
    with pytest.raises(NotFound, match="no job at /v1/jobs/other"):
        client.cancel("other")


def sampler(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/version":
        return httpx.Response(200, json={"service": "rollout", "hone": "1", "vllm": "0"})
    return httpx.Response(404, json=NotFound(f"no route {request.url.path}").problem())


def test_a_sampler_at_the_orchestrators_url_is_named() -> None:
    said = (
        "http://127.0.0.1:8001 is the rollout service of Hone, not the orchestrator service; "
        "HONE_ORCHESTRATOR_URL is the orchestrator service's, by default http://127.0.0.1:8000"
    )
    with answering(sampler) as client:
        for ask in (client.ping, client.list, lambda: client.get("demo"), client.keys):
            with pytest.raises(BadRequest) as error:
                ask()
            assert error.value.detail == said


@pytest.mark.parametrize(
    "other", [httpx.Response(200, html="<p>Welcome</p>"), httpx.Response(404), httpx.Response(301)]
)
def test_what_is_no_service_of_hone_is_said_to_be_none(other: httpx.Response) -> None:
    with answering(lambda _: other) as client:
        for ask in (client.ping, client.list):
            with pytest.raises(BadRequest, match=r"127\.0\.0\.1:8001 is no service of Hone; HONE"):
                ask()


@pytest.mark.parametrize("url", ["localhost:8000", "", "http://"])
def test_a_url_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(BadRequest, match="the orchestrator's URL: "):
        Client(url)


def test_both_clients_have_the_same_methods() -> None:
    public = {name for name in dir(AsyncClient) if not name.startswith("_")}
    assert {name for name in dir(Client) if not name.startswith("_")} - {"run", "url"} == public
    for name in public - {"events", "close"}:
        assert inspect.signature(getattr(Client, name)) == inspect.signature(
            getattr(AsyncClient, name)
        )
        assert getattr(Client, name).__doc__ == getattr(AsyncClient, name).__doc__


async def test_the_asynchronous_client_awaits_the_same_answers() -> None:
    async with AsyncClient() as client:
        client._calls.client = shared_client.Client(
            "orchestrator", "http://localhost", transport=httpx.MockTransport(answer)
        )
        assert (await client.cancel("demo")).status == "cancelled"
        assert [job.id for job in await client.list(name="demo")] == ["demo-1"]


def test_a_field_of_a_newer_orchestrator_is_ignored(client: Client) -> None:
    assert client.cancel("demo-2") == JobState(id="demo-2", status="cancelled")


def test_lists_are_iterated_counted_and_indexed(client: Client) -> None:
    found = client.list(name="demo")
    assert len(found) == 1 and [job.name for job in found] == ["demo"]
    assert found[-1].id == "demo-1" and found[:1] == found.jobs
    assert not client.list(name="none")


def test_a_job_may_be_a_dict_and_its_faults_are_sentences(client: Client) -> None:
    submitted = {"name": "demo", "model": "m", "steps": 1, "stepz": 2}
    for ask in (client.submit, client.dry_run, client.plan):
        with pytest.raises(BadRequest, match=r"unknown key 'stepz'; did you mean 'steps'\?"):
            ask(submitted)
    with pytest.raises(BadRequest, match="first_step': got 0; input should be greater than"):
        client.regrade("demo-1", 0, 1, ())
    assert submitted == {"name": "demo", "model": "m", "steps": 1, "stepz": 2}


def test_what_is_no_job_is_refused_with_a_sentence(client: Client) -> None:
    for given in ("job.toml", None):
        for ask in (client.submit, client.dry_run, client.plan):
            with pytest.raises(BadRequest) as raised:
                ask(given)  # type: ignore[arg-type]
            assert raised.value.detail == (
                f"the job is {given!r}; expected a dict, or a Job, which hone.load_job reads from "
                "a file"
            )


def test_a_job_file_is_named_by_a_str(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        'name = "t"\nmodel = "owner/model"\nsteps = 3\n[data]\ntrain = "x"\n'
        '[[rewards]]\ngrader = "length"\n'
    )
    assert load_job(str(file), ["steps=4"]) == load_job(file, ["steps=4"])
    with pytest.raises(BadRequest, match=r"no job file at 'nojob\.toml'"):
        load_job("nojob.toml")


def test_a_client_that_is_closed_says_so(client: Client) -> None:
    client.close()
    client.close()
    with pytest.raises(BadRequest, match="the client is closed; expected a new one"):
        client.list()


def test_each_paused_job_is_resumed_and_one_that_cannot_be_stops_no_other() -> None:
    def paused(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/jobs":
            assert request.url.params["status"] == "paused"
            first = "after" not in request.url.params
            job = record("paused").model_copy(update={"id": "demo-2" if first else "demo-1"})
            page = JobList(jobs=(job,), next_after="demo-2" if first else None)
            return httpx.Response(200, json=page.model_dump(mode="json"))
        if "demo-1" in request.url.path:
            return httpx.Response(409, json=Conflict("job 'demo-1' has failed").problem())
        state = JobState(id="demo-2", status="queued")
        return httpx.Response(200, json=state.model_dump(mode="json"))

    def known(request: httpx.Request) -> httpx.Response:
        return answer(request) if request.url.path == "/version" else paused(request)

    with answering(known) as client:
        assert client.resume_all() == (
            ResumeResult(id="demo-1", problem="job 'demo-1' has failed"),
            ResumeResult(id="demo-2", status="queued"),
        )


@pytest.mark.parametrize(
    ("limit", "asked"),
    [
        (2, [("0", "2")]),
        (5, [("0", "5"), ("3", "2")]),
        (None, [("0", None), ("3", None), ("6", None)]),
    ],
)
def test_no_more_rollouts_are_asked_for_than_are_wanted(
    limit: int | None, asked: list[tuple[str, str | None]]
) -> None:
    seen: list[tuple[str, str | None]] = []

    def pages(request: httpx.Request) -> httpx.Response:
        """Answers with pages of at most 3 of 7 rollouts."""
        if request.url.path == "/version":
            return answer(request)
        if request.url.path == "/v1/jobs/demo-1":
            return httpx.Response(200, json=record("running").model_dump(mode="json"))
        after, most = request.url.params["after"], request.url.params.get("limit")
        seen.append((after, most))
        end = min(int(after) + min(int(most or 3), 3), 7)
        graded = {
            "prompt": "p",
            "completion": "c",
            "finish_reason": "stop",
            "versions": [4],
            "reward": 1.0,
            "parts": {},
            "advantage": 0.5,
        }
        rollouts = [{**graded, "prompt_index": at} for at in range(int(after), end)]
        body = {"step": 4, "rollouts": rollouts, "next_after": end if end < 7 else None}
        return httpx.Response(200, json=body)

    with answering(pages) as client:
        found = client.rollouts("demo-1", limit=limit)
        assert [each.prompt_index for each in found.rollouts] == [*range(limit or 7)]
        assert seen == asked
        seen.clear()
        assert client.held_out("demo-1", limit=limit).rollouts == found.rollouts
        assert seen == asked
