"""A job's life as the API shows it: it runs, fails, hangs, is listed, cancelled and deleted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.records import WAS_DELETED, find_runs
from shared.errors import NotFound
from shared.job import Job
from shared.settings import Settings
from shared.wire import (
    JobList,
    JobRecord,
)
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_stack import Stack, finish, orchestrator_client

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures


async def test_a_job_runs_to_its_end_and_leaves_everything_in_its_folder(
    stack: Stack, tmp_path: Path
) -> None:
    record = await stack.run()
    assert (record.status, record.step, record.error) == ("succeeded", 8, None)
    assert (
        record.summary is not None
        and record.summary["eval_after"] > record.summary["eval_before"] == 0.0
    )
    folder = RunFolder(Path(record.run_dir))
    assert folder.path == (tmp_path / "runs" / record.id).resolve()
    assert [row.step for row in folder.metrics()] == list(range(9))
    assert folder.batch_steps() == list(range(1, 9))
    versions = [folder.batch(step).version for step in range(1, 9)]
    assert versions == list(range(8)), "the weights just trained"
    assert all(row.metrics["staleness"] == 0 for row in folder.metrics() if row.step)
    on_disk = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert on_disk == record.summary
    assert {"eval_before", "eval_after", "steps", "train_s", "wall_s", "versions"} <= set(on_disk)
    assert stack.fakes.calls["train_step"] == 8 and stack.fakes.calls["reload"] == 9


async def test_a_service_that_hangs_pauses_the_job_by_its_deadline(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes, released = FakeServices(settings), asyncio.Event()
    fakes.fault["train_step"] = lambda _: released.wait()
    settings = settings.model_copy(update={"operation_deadline_s": 2.0})
    async with (
        fakes.running(settings) as settings,
        orchestrator_client(settings, redis_url) as client,
    ):
        found = await finish(client, job, "paused", "failed")
        released.set()
    assert found.status == "paused" and found.error is not None
    assert found.error.startswith("trainer at http://127.0.0.1:")
    assert "did not finish POST /train_step within 2 s" in found.error


async def test_jobs_are_listed_newest_first_in_pages(stack: Stack) -> None:
    ids = [(await stack.submit()).id for _ in range(3)]
    page = await stack.client.get("/v1/jobs?limit=2", JobList)
    assert [record.id for record in page.jobs] == ids[:0:-1] and page.next_after
    rest = await stack.client.get(f"/v1/jobs?limit=2&after={page.next_after}", JobList)
    assert [record.id for record in rest.jobs] == ids[:1] and rest.next_after is None


async def test_a_list_has_summaries_filtered_by_status_name_and_metadata(stack: Stack) -> None:
    tagged = stack.job.model_copy(update={"metadata": {"team": "math"}})
    made = await stack.submit(tagged)
    await stack.until(made.id)
    (summary,) = (await stack.http.get("/v1/jobs?metadata[team]=math")).json()["jobs"]
    assert "job" not in summary and "run_dir" not in summary
    assert (summary["model"], summary["metadata"]) == ("owner/model", {"team": "math"})
    for query, count in (
        ("status=succeeded&name=demo", 1),
        ("status=queued", 0),
        ("name=dem", 0),
        ("metadata[team]=art", 0),
        ("metadata=null", 0),
    ):
        assert len((await stack.http.get(f"/v1/jobs?{query}")).json()["jobs"]) == count, query
    refused = (await stack.http.get("/v1/jobs?status=done")).json()["detail"]
    assert refused.startswith("'status': got 'done'; ")
    refused = (await stack.http.get("/v1/jobs?metadata=math")).json()["detail"]
    assert refused == "'metadata': got 'math'; expected metadata[name]=value, or null"


async def test_an_unknown_job_is_not_found(stack: Stack) -> None:
    for path in ("", "/events", "/metrics", "/rollouts", "/checkpoints"):
        with pytest.raises(NotFound, match="no job 'nope'"):
            await stack.client.get(f"/v1/jobs/nope{path}", JobRecord)


@pytest.mark.slow
async def test_a_queued_job_is_cancelled_at_once_and_a_running_one_within_seconds(
    stack: Stack,
) -> None:
    blocked = asyncio.Event()
    stack.fakes.fault["train_step"] = lambda _: blocked.wait()
    running, queued = (await stack.submit()).id, (await stack.submit()).id
    await stack.until(running, "running")
    assert (await stack.http.post(f"/v1/jobs/{queued}/cancel")).json()["status"] == "cancelled"
    await stack.http.post(f"/v1/jobs/{running}/cancel")
    assert (await stack.until(running)).status == "cancelled"
    again = await stack.http.post(f"/v1/jobs/{running}/cancel")
    assert again.status_code == 200
    blocked.set()
    stack.fakes.fault.clear()
    assert (await stack.run()).status == "succeeded", "the worker is free again"


@pytest.mark.slow
async def test_a_deleted_job_is_gone_and_its_files_stay_unless_they_are_asked_for(
    stack: Stack,
) -> None:
    kept, removed = [await stack.run() for _ in range(2)]
    for record, query, files in ((kept, "", False), (removed, "?files=true", True)):
        for _ in range(2):
            response = await stack.http.delete(f"/v1/jobs/{record.id}{query}")
            assert response.status_code == 200
            assert response.json() == {"id": record.id, "files": files}
        assert Path(record.run_dir).exists() is not files
        for path in ("", "/events", "/metrics", "/rollouts", "/checkpoints"):
            assert (await stack.http.get(f"/v1/jobs/{record.id}{path}")).status_code == 404
    assert (await stack.client.get("/v1/jobs", JobList)).jobs == ()
    (left,) = find_runs(stack.settings.runs_dir)
    assert (left.id, left.job, left.problem) == (kept.id, None, WAS_DELETED), "also without Redis"
    assert (await stack.http.delete("/v1/jobs/nope")).status_code == 404


async def test_a_job_that_has_not_ended_is_not_deleted(stack: Stack) -> None:
    training = stack.fakes.hold("train_step")
    running, queued = (await stack.submit()).id, (await stack.submit()).id
    await training.arrival()
    for job_id, status in ((running, "running"), (queued, "queued")):
        response = await stack.http.delete(f"/v1/jobs/{job_id}?files=true")
        assert response.status_code == 409
        assert f"job {job_id!r} is {status}; cancel it" in response.json()["detail"]
    assert stack.folder(running).path.exists()
    await stack.post(f"{queued}/cancel")
    assert (await stack.http.delete(f"/v1/jobs/{queued}")).status_code == 200
    training.released.set()


async def test_prometheus_hears_how_many_jobs_run_and_wait(stack: Stack) -> None:
    blocked = asyncio.Event()
    stack.fakes.fault["train_step"] = lambda _: blocked.wait()
    ids = [(await stack.submit()).id for _ in range(3)]
    await until_said(stack, "hone_orchestrator_queued_jobs 2.0")
    await until_said(stack, "hone_orchestrator_running_jobs 1.0")
    blocked.set()
    for job_id in ids:
        await stack.until(job_id)
    await until_said(stack, "hone_orchestrator_queued_jobs 0.0")
    await until_said(stack, "hone_orchestrator_running_jobs 0.0")


async def until_said(stack: Stack, metric: str) -> None:
    async with asyncio.timeout(90):
        while metric not in (await stack.http.get("/metrics")).text:
            await asyncio.sleep(0.1)
