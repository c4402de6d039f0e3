"""The jobs API as Modal serves it: what it asks of its Volumes, and whom it starts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest

from deploy.modal import api, orchestrator
from deploy.modal.api import JobsApi
from deploy.modal.calls import Call
from services.orchestrator.queue.store import Store
from shared.client import Client
from shared.config import Settings
from shared.errors import Unavailable
from shared.job import Job
from shared.ports import free_port
from shared.wire import JobList, JobRecord, SubmitRequest, VersionInfo
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.modal_control_plane import ControlPlane

job = orchestrator_stack.job  # a fixture

TOKEN = "a-token-of-the-services"


class FakeVolume:
    """Notes what is asked of it."""

    def __init__(self, asked: list[str], name: str) -> None:
        self._asked, self._name = asked, name

    def __getattr__(self, verb: str) -> Any:
        async def ask() -> None:
            self._asked.append(f"{verb} {self._name}")

        return type("Method", (), {"aio": staticmethod(ask)})


class Served:
    """A JobsApi around an application that answers `status` once it may, with what was asked of
    the Volumes, and when the trainer was started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.status, self.work = 200, True
        self.may_answer = asyncio.Event()
        self.may_answer.set()

        async def has_work(_: Any) -> bool:
            return self.work

        async def start() -> None:
            self.asked.append("start trainer")

        async def application(scope: Any, receive: Any, send: Any) -> None:
            await self.may_answer.wait()
            await send({"type": "http.response.start", "status": self.status, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        monkeypatch.setattr(api, "has_work", has_work)
        runs, data = FakeVolume(self.asked, "runs"), FakeVolume(self.asked, "data")
        store: Any = None
        transport = httpx.ASGITransport(app=JobsApi(application, store, runs, data, start))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://a")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


async def test_what_others_wrote_is_seen_within_seconds_and_not_asked_for_each_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.http.get("/v1/jobs")
    await served.http.get("/v1/jobs")
    assert served.asked == ["reload runs", "reload data"]
    monkeypatch.setattr(api, "REFRESH_S", 0.0)
    await served.http.get("/v1/jobs")
    assert served.asked == ["reload runs", "reload data"] * 2


async def test_a_volume_is_not_reloaded_under_a_request(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.http.get("/v1/jobs")
    monkeypatch.setattr(api, "REFRESH_S", 0.0)
    served.asked.clear()
    served.may_answer.clear()
    first = asyncio.create_task(served.http.get("/v1/jobs/a/rollouts"))
    while not served.asked:
        await asyncio.sleep(0)
    second = asyncio.create_task(served.http.get("/v1/jobs/a/metrics"))
    await asyncio.sleep(0.01)
    assert served.asked == ["reload runs", "reload data"], "by the first request alone"
    served.may_answer.set()
    await asyncio.gather(first, second)


async def test_an_event_stream_holds_up_no_reload(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "REFRESH_S", 0.0)
    served.may_answer.clear()
    headers = {"accept": "text/event-stream"}
    stream = asyncio.create_task(served.http.get("/v1/jobs/a/events", headers=headers))
    await asyncio.sleep(0.01)
    assert served.asked == []
    request = asyncio.create_task(served.http.get("/v1/jobs"))
    while len(served.asked) < 2:
        await asyncio.sleep(0)
    served.may_answer.set()
    await asyncio.gather(stream, request)


async def test_a_change_is_committed_before_the_trainer_is_started(served: Served) -> None:
    await served.http.post("/v1/jobs", content=b"{}")
    assert served.asked[2:] == ["commit runs", "start trainer"]
    served.status = 422
    await served.http.post("/v1/jobs", content=b"{}")
    assert served.asked[2:] == ["commit runs", "start trainer"]
    served.status, served.work = 201, False
    await served.http.post("/v1/files", content=b"{}")
    assert served.asked[2:] == ["commit runs", "start trainer", "commit runs"]


async def test_a_volume_that_is_in_use_is_read_as_it_was(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy() -> None:
        raise RuntimeError("there are open files preventing the operation")

    monkeypatch.setattr(
        FakeVolume, "reload", type("M", (), {"aio": staticmethod(busy)}), raising=False
    )
    assert (await served.http.get("/v1/jobs")).status_code == 200


async def test_the_trainer_is_started_once_the_services_that_it_calls_answer(
    redis_url: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    async def wake(urls: Sequence[str]) -> None:
        done.append(f"wake {','.join(urls)}")
        if len(done) == 1:
            raise Unavailable("http://b does not answer")

    async def start() -> None:
        done.append("start")

    monkeypatch.setattr(api.inside, "wake", wake)
    store = Store(redis_url)
    await store.open()
    try:
        await api.bring_trainer(store, ["http://a", "http://b"], start)
        assert done == [], "no job waits"
        first = (await store.submit(job, tmp_path, None)).id
        await api.bring_trainer(store, ["http://a", "http://b"], start)
        assert done == ["wake http://a,http://b"]
        paused = await store.get(first)
        assert (paused.status, paused.error) == ("paused", "http://b does not answer")
        await store.resume(first)
        await api.bring_trainer(store, ["http://a", "http://b"], start)
        assert done[1:] == ["wake http://a,http://b", "start"]
        assert (await store.get(first)).status == "queued"
    finally:
        await store.close()


async def test_a_trainer_that_failed_pauses_jobs_and_starts_for_one_that_is_resumed(
    redis_url: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    async def last() -> Call:
        return Call(is_running=False, failure="RuntimeError: no CUDA")

    async def forget() -> None:
        done.append("forgotten")

    monkeypatch.setenv("HONE_REDIS_URL", redis_url)
    monkeypatch.setattr(orchestrator, "calls", SimpleNamespace(last=last, forget=forget))
    store = Store(redis_url)
    await store.open()
    try:
        id = (await store.submit(job, tmp_path, None)).id
        await orchestrator.watch.local()
        paused = await store.get(id)
        assert (paused.status, done) == ("paused", ["forgotten"])
        assert paused.error and "4 times in a row: RuntimeError: no CUDA" in paused.error
        await store.resume(id)
        assert await api.has_work(store)
    finally:
        await store.close()


@pytest.mark.slow
async def test_the_app_takes_jobs_has_the_watch_look_and_runs_none_itself(
    settings: Settings, redis_url: str, job: Job, tmp_path: Path
) -> None:
    """`.local()` of the deployed function, served by uvicorn, with Redis, against a control
    plane that tells it where the other services are."""
    fakes = FakeServices(settings)
    async with fakes.running(settings) as settings:
        with ControlPlane() as plane:
            plane.urls = {"Reward": settings.reward_url, "Sampler0": settings.rollout_url}
            port = free_port()
            process = _serve(plane, port, redis_url, settings.runs_dir)
            try:
                await _takes_jobs(f"http://127.0.0.1:{port}", plane, job)
                store = Store(redis_url)
                leases = await store._redis.keys("*lease*")
                await store.close()
                assert leases == [], "no worker took the job"
            finally:
                process.terminate()
                process.wait()
    assert [call["volume_id"] for call in plane.calls["VolumeCommit"]] == ["vo-hone-runs"] * 2


async def _takes_jobs(url: str, plane: ControlPlane, job: Job) -> None:
    async with Client("orchestrator", url, token=TOKEN) as client:
        await client.get("/version", VersionInfo, deadline_s=120)
        for number in (1, 2):
            body = SubmitRequest(job=job.model_copy(update={"name": f"job-{number}"}))
            record = await client.call("POST", "/v1/jobs", body, JobRecord, deadline_s=60)
            assert record.status == "queued"
        async with asyncio.timeout(60):  # what is started is started after the answer
            while len(plane.calls["VolumeCommit"]) < 2 or len(plane.inputs) < 2:
                await asyncio.sleep(0.05)
        jobs = await client.get("/v1/jobs", JobList)
    assert [each.status for each in jobs.jobs] == ["queued", "queued"]
    called = [(call["app_name"], call["object_tag"]) for call in plane.calls["FunctionGet"]]
    assert called[-2:] == [("hone-orchestrator", "watch")] * 2, "what has no GPU starts the trainer"
    assert plane.calls["VolumeReload"]


def _serve(plane: ControlPlane, port: int, redis_url: str, runs: Path) -> subprocess.Popen[bytes]:
    own = {
        "HONE_REDIS_URL": redis_url,
        "HONE_RUNS_DIR": str(runs),
        "HONE_TOKEN": TOKEN,
    }
    command = ["uvicorn", "--factory", "deploy.modal.orchestrator:api.local", "--port", str(port)]
    return subprocess.Popen([sys.executable, "-m", *command], env=plane.environment() | own)
