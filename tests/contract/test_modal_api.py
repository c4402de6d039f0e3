"""The jobs API as Modal serves it: what it asks of its Volumes, and whom it starts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest

from deploy.modal import api, orchestrator
from deploy.modal.api import JobsApi
from deploy.modal.calls import Call
from services.orchestrator.store.records import Submission
from services.orchestrator.store.store import Store
from shared.errors import Unavailable
from shared.host.processes import free_port
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings
from shared.wire import JobList, JobRecord, SubmitRequest, VersionInfo
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.modal_control_plane import ControlPlane

job, store = orchestrator_stack.job, orchestrator_stack.store  # fixtures

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
    store: Store, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    async def wake(urls: Sequence[str]) -> None:
        done.append(f"wake {','.join(urls)}")
        if len(done) == 1:
            raise Unavailable("http://b does not answer")

    async def start() -> None:
        done.append("start")

    monkeypatch.setattr(api.inside, "wake", wake)
    await api.bring_trainer(store, ["http://a", "http://b"], start)
    assert done == [], "no job waits"
    first = (await store.submit(Submission(job, tmp_path))).id
    await api.bring_trainer(store, ["http://a", "http://b"], start)
    assert done == ["wake http://a,http://b"]
    paused = await store.get(first)
    assert (paused.status, paused.error) == ("paused", "http://b does not answer")
    await store.resume(first)
    await api.bring_trainer(store, ["http://a", "http://b"], start)
    assert done[1:] == ["wake http://a,http://b", "start"]
    assert (await store.get(first)).status == "queued"


class FailedTrainer:
    """A trainer's Function that was called at `called_at`, failed, and was looked at by `watch`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
        self.called_at = 0.0
        self.num_forgotten = 0
        monkeypatch.setenv("HONE_REDIS_URL", redis_url)
        monkeypatch.setattr(api, "gone_s", lambda _: 0.0)
        own = SimpleNamespace(last=self._last, forget=self._forget)
        monkeypatch.setattr(orchestrator, "calls", own)

    async def _last(self) -> Call:
        return Call(False, "RuntimeError: no CUDA", self.called_at)

    async def _forget(self) -> None:
        self.num_forgotten += 1

    async def is_seen(self) -> None:
        await orchestrator.watch.local()


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> FailedTrainer:
    return FailedTrainer(monkeypatch, redis_url)


async def shown(store: Store, *ids: str) -> list[str]:
    return [(await store.get(id)).status for id in ids]


FAILED = (
    "the trainer's Function failed on Modal, 4 times in a row: RuntimeError: no CUDA. This job is "
    "paused because"
)


async def test_a_trainer_that_failed_pauses_the_job_that_it_had_and_no_other(
    store: Store, failed: FailedTrainer, job: Job, tmp_path: Path
) -> None:
    begun, halted = [(await store.submit(Submission(job, tmp_path))).id for _ in range(2)]
    for _ in range(2):
        assert await store.take("modal", "modal:8002", lease_s=0.05)
        await asyncio.sleep(0.1)
        await store.pause(begun)
    assert await shown(store, begun, halted) == ["paused", "running"]
    await store.resume(begun)
    lease = await store.take("modal", "modal:8002", lease_s=60)
    assert lease and lease.job_id == halted
    await store.halt(lease, None)  # as an orchestrator does that is asked to stop
    failed.called_at = time.time() + 60
    await failed.is_seen()
    assert await shown(store, begun, halted) == ["queued", "paused"]
    error = (await store.get(halted)).error
    assert error and error.startswith(
        f"{FAILED} it was running this job. `modal app logs hone-trainer`"
    )
    assert failed.num_forgotten == 1


async def test_a_trainer_that_came_to_no_job_pauses_those_that_it_was_called_for(
    store: Store, failed: FailedTrainer, job: Job, tmp_path: Path
) -> None:
    first, meanwhile = [(await store.submit(Submission(job, tmp_path))).id for _ in range(2)]
    failed.called_at = (await store.get(meanwhile)).created_at
    await failed.is_seen()
    assert await shown(store, first, meanwhile) == ["paused", "queued"]
    error = (await store.get(first)).error
    assert error and f"{FAILED} it took no job, and there is no other trainer" in error
    assert failed.num_forgotten == 1
    await store.resume(first)
    assert await api.has_work(store)


async def test_a_trainer_that_failed_leaves_alone_what_another_one_has_or_can_run(
    store: Store, failed: FailedTrainer, job: Job, tmp_path: Path
) -> None:
    runs, cut_off, waits = [(await store.submit(Submission(job, tmp_path))).id for _ in range(3)]
    assert await store.take("a", "a:8002", lease_s=60)
    assert await store.take("b", "b:8002", lease_s=0.05)
    await asyncio.sleep(0.1)
    await store.trainers.register("b/host", "b:8002", [], None)
    failed.called_at = time.time() + 60
    await failed.is_seen()
    assert await shown(store, runs, cut_off, waits) == ["running", "running", "queued"]
    assert not (await store.get(runs)).pause_requested
    assert failed.num_forgotten == 1


def test_a_trainer_that_ended_is_judged_once_nothing_of_it_is_in_redis() -> None:
    assert api.gone_s(Settings(lease_s=30.0)) == 30.0
    assert api.gone_s(Settings(lease_s=5.0)) == 10.0


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
        async with asyncio.timeout(90):  # what is started is started after the answer
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
