"""The folder of runs: it cannot be written, or a run folder in it is deleted."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import redis.asyncio as redis

from hone.commands.doctor import examine_stack
from services.orchestrator.app import create_service
from services.orchestrator.store.connection import StoreUnavailable
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.records import Submission, find_runs
from services.orchestrator.store.store import Store
from shared.errors import Conflict, Failed
from shared.host.processes import free_port
from shared.http.client import Client
from shared.job import CheckpointSpec, Job
from shared.settings import Settings
from shared.wire import (
    CheckpointList,
    JobDeleted,
    JobRecord,
    JobState,
    Recovered,
    TrainStepRequest,
)
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_process import start
from tests.support.orchestrator_stack import Stack, orchestrator, submit, until_ended
from tests.support.running import served

job, stack, store = (  # fixtures
    orchestrator_stack.job,
    orchestrator_stack.stack,
    orchestrator_stack.store,
)


@contextlib.contextmanager
def away(folder: Path) -> Any:
    """A file is in the place of the folder: root can write where others cannot."""
    moved = folder.rename(folder.with_name("moved"))
    folder.write_text("no folder")
    yield f"cannot write to folder {str(folder)!r}: Not a directory; check HONE_RUNS_DIR"
    folder.unlink()
    moved.rename(folder)


async def orchestrator_check(settings: Settings) -> tuple[str, str]:
    """Returns what `hone doctor` says of the orchestrator."""
    checks = {check.name: check for check in await examine_stack(settings)}
    return checks["orchestrator"].state, checks["orchestrator"].detail


async def ready(stack: Stack) -> tuple[int, dict[str, str]]:
    answer = await stack.http.get("/readyz")
    said = answer.json()["dependencies"]
    return answer.status_code, {name: each["detail"] for name, each in said.items()}


# --- it cannot be written ------------------------------------------------------------------------


async def test_readyz_says_why_the_runs_folder_cannot_be_written(stack: Stack) -> None:
    assert await ready(stack) == (200, {"redis": "ready", "runs": "ready"})
    with away(stack.settings.runs_dir) as why:
        assert await ready(stack) == (503, {"redis": "ready", "runs": why})
    assert (await ready(stack))[0] == 200


async def test_nothing_is_accepted_while_the_runs_folder_cannot_be_written(stack: Stack) -> None:
    openai = {"model": "owner/model", "training_file": f"file-{'0' * 24}"}
    with away(stack.settings.runs_dir) as why:
        for path, body in (
            ("/v1/jobs", {"job": stack.job.model_dump(mode="json")}),
            ("/v1/fine_tuning/jobs", openai | {"method": METHOD, "hone": {"steps": 1}}),
        ):
            refused = await stack.http.post(path, json=body)
            assert refused.status_code == 503, refused.text
            assert why in refused.text.replace('\\"', '"')
        assert (await stack.http.get("/v1/jobs")).json()["jobs"] == []
    assert (await stack.run()).status == "succeeded"


METHOD = {
    "type": "reinforcement",
    "reinforcement": {
        "grader": {
            "type": "string_check",
            "name": "same",
            "operation": "eq",
            "input": "{{sample.output_text}}",
            "reference": "{{item.answer}}",
        }
    },
}


async def test_an_orchestrator_does_not_start_that_cannot_write_its_runs_folder(
    tmp_path: Path, redis_url: str
) -> None:
    (tmp_path / "file").write_text("no folder")
    for folder, why in (("file", "Not a directory"), ("file/runs", "Not a directory")):
        runs_dir = tmp_path / folder
        process = await start(
            redis_url, stderr=asyncio.subprocess.PIPE, HONE_RUNS_DIR=str(runs_dir)
        )
        _, said = await process.communicate()
        assert (process.returncode, said.decode()) == (
            2,
            f"cannot write to folder {str(runs_dir)!r}: {why}; check HONE_RUNS_DIR\n",
        )


def test_doctor_says_where_no_stack_could_be_started(settings: Settings, tmp_path: Path) -> None:
    settings = settings.model_copy(update={"orchestrator_url": f"http://127.0.0.1:{free_port()}"})

    def found(runs_dir: Path) -> tuple[str, str]:
        own = settings.model_copy(update={"runs_dir": runs_dir})
        checks = {check.name: check for check in asyncio.run(examine_stack(own))}
        return checks["runs folder"].state, checks["runs folder"].detail

    (tmp_path / "file").write_text("no folder")
    assert found(tmp_path / "runs") == ("ok", f"{tmp_path / 'runs'} can be written")
    for named, there in (("file", "file"), ("file/runs", "file"), ("volume/runs", "volume")):
        assert found(tmp_path / named) == (
            "fault",
            f"HONE_RUNS_DIR is {str(tmp_path / named)!r}, and {str(tmp_path / there)!r} is no "
            "folder that can be written; `hone up` would not start",
        )


# --- Redis was emptied ---------------------------------------------------------------------------


async def test_an_orchestrator_whose_redis_was_emptied_is_not_ready(
    settings: Settings, store: Store, redis_url: str
) -> None:
    service = create_service(settings, store, works=False)
    async with served(service.server(0)) as url:
        settings = settings.model_copy(update={"orchestrator_url": url})
        assert await orchestrator_check(settings) == ("ok", f"{url} redis: ready; runs: ready")
        await empty(redis_url)
        why = "Redis was emptied, or replaced by another one, while it was used; bring its file"
        state, detail = await orchestrator_check(settings)
        assert state == "fault" and detail.startswith(f"{url} redis: {why}")


# --- a job is on disk before it is accepted ------------------------------------------------------


@dataclass
class Front:
    settings: Settings
    store: Store
    client: Client
    job: Job

    async def submit(self, key: str | None = None) -> JobRecord:
        return await submit(self.client, self.job, key)

    async def recover(self) -> dict[str, str | None]:
        found = await self.client.call("POST", "/v1/recover", None, Recovered, deadline_s=60)
        return {job.id: job.status for job in found.jobs}

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.settings.runs_dir.iterdir() if path.name[0] != ".")


@contextlib.asynccontextmanager
async def front(settings: Settings, redis_url: str, job: Job) -> AsyncGenerator[Front]:
    """An orchestrator that accepts jobs, and begins none."""
    fakes, store = FakeServices(settings), Store(redis_url)
    await store.open()
    async with fakes.running(settings) as settings:
        service = create_service(settings, store, works=False)
        async with service.app.router.lifespan_context(service.app):
            transport = httpx.ASGITransport(app=service.app)
            async with Client("orchestrator", "http://localhost", transport=transport) as client:
                yield Front(settings, store, client, job)


async def empty(redis_url: str) -> None:
    client = redis.from_url(redis_url)
    await client.flushall()
    await client.aclose()


async def test_jobs_that_had_not_begun_are_rebuilt_from_their_folders_and_run(
    settings: Settings, redis_url: str, job: Job
) -> None:
    async with front(settings, redis_url, job.model_copy(update={"priority": 7})) as before:
        waiting = await before.submit("key")
        paused = await before.submit()
        await before.store.pause(paused.id)
        cancelled, gone = await before.submit(), await before.submit()
        for each in (cancelled, gone):
            await before.client.call(
                "POST", f"/v1/jobs/{each.id}/cancel", None, JobState, deadline_s=9
            )
        await before.client.call(
            "DELETE", f"/v1/jobs/{gone.id}?files=true", None, JobDeleted, deadline_s=9
        )
        ids = sorted([waiting.id, paused.id, cancelled.id])
        assert before.folders() == ids, "and no runs/<name>, which is of a job that has begun"
    await empty(redis_url)
    async with front(settings, redis_url, job.model_copy(update={"priority": 7})) as after:
        assert await after.recover() == {
            waiting.id: "paused",
            paused.id: "paused",
            cancelled.id: "cancelled",
        }
        found = await after.store.get(waiting.id)
        assert (found.job, found.data, found.created_at) == (
            waiting.job,
            waiting.data,
            waiting.created_at,
        )
        assert found.error and found.error.endswith(f"`hone resume {waiting.id}` begins it")
        assert (await after.submit("key")).id == waiting.id
        await after.store.resume(waiting.id)
    fakes = FakeServices(settings)
    async with fakes.running(settings) as settings, orchestrator(settings, redis_url) as (store, _):
        assert (await until_ended(store, waiting.id)).status == "succeeded"
    assert not (settings.runs_dir / waiting.id / ".job.json").exists()


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_submission_whose_answer_from_redis_is_lost_leaves_no_second_job(
    settings: Settings, redis_url: str, job: Job, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """Redis took the job or did not; no one heard."""
    async with front(settings, redis_url, job) as at:
        submit = at.store.submit

        async def lost(submission: Submission) -> JobRecord:
            monkeypatch.setattr(at.store, "submit", submit)
            if is_there:
                await submit(submission)
            raise StoreUnavailable("Redis cannot be used: the connection broke")

        monkeypatch.setattr(at.store, "submit", lost)
        record = await at.submit("key")  # its client asks again
        assert [each.id for each in (await at.store.list(None, 10)).jobs] == [record.id]
        assert (Path(record.run_dir) / "job.json").exists()
    await empty(redis_url)
    async with front(settings, redis_url, job) as at:
        assert await at.recover() == {record.id: "paused"}


async def test_a_submission_that_redis_refuses_leaves_no_folder(
    settings: Settings, redis_url: str, job: Job
) -> None:
    async with front(settings, redis_url, job) as at:
        first, second = await asyncio.gather(at.submit("key"), at.submit("key"))
        assert first.id == second.id and at.folders() == [first.id]
        await empty(redis_url)
        with pytest.raises(Conflict) as refusal:
            await at.submit()
        assert refusal.value.code == "emptied" and at.folders() == [first.id]


async def test_a_run_folder_that_cannot_be_made_is_no_job(
    settings: Settings, redis_url: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: RunFolder, *_: object) -> None:
        folder.path.mkdir()
        raise Failed("the disk is full", code="disk_full")

    async with front(settings, redis_url, job) as at:
        monkeypatch.setattr(RunFolder, "prepare", full)
        refused = await at.client._http.post("/v1/jobs", json={"job": job.model_dump(mode="json")})
        assert (refused.status_code, refused.json()["detail"]) == (503, "the disk is full")
        assert (await at.store.list(None, 10)).jobs == () and at.folders() == []


# --- a run folder is deleted ---------------------------------------------------------------------


@pytest.mark.parametrize("what", ["content", "moved"])
async def test_a_job_whose_run_folder_is_deleted_pauses_and_says_so(
    stack: Stack, what: str
) -> None:
    moved = stack.settings.runs_dir.resolve() / "moved"

    async def delete(body: TrainStepRequest) -> None:
        folder = moved.with_name(body.job_id)
        if body.step == 5 and not moved.exists():
            if what == "content":
                for path in list(folder.iterdir()):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            else:
                folder.rename(moved)

    stack.fakes.fault["train_step"] = delete
    spec = CheckpointSpec(every=2, keep_last=9)
    record = await stack.submit(stack.job.model_copy(update={"checkpoints": spec}))
    folder = Path(record.run_dir)
    paused = await stack.until(record.id, "paused")
    why = (
        f"the run folder {str(folder)!r}, or its job.json, was removed or moved: nothing more is "
        "written there; put it back"
    )
    assert paused.error == f"{why}, then `hone resume {record.id}` continues from there"
    levels = [(event.level, event.message) for event in await stack.events(record.id)]
    assert ("error", why) in levels
    assert not folder.exists() or list(folder.iterdir()) == []
    listed = await stack.client.get(f"/v1/jobs/{record.id}/checkpoints", CheckpointList)
    assert listed.checkpoints == ()
    await stack.post(f"{record.id}/resume")
    again = await stack.until(record.id, "paused")
    assert again.error == paused.error and not (folder / "job.json").exists()
    if what == "moved":
        stack.fakes.fault.clear()
        moved.rename(folder)
        await stack.post(f"{record.id}/resume")
        assert (await stack.until(record.id)).status == "succeeded"
        listed = await stack.client.get(f"/v1/jobs/{record.id}/checkpoints", CheckpointList)
        assert [each.step for each in listed.checkpoints] == [2, 4, 6, 8]


async def test_recover_names_a_run_folder_of_which_half_was_deleted(tmp_path: Path) -> None:
    (tmp_path / "demo-1/checkpoints/step-000002").mkdir(parents=True)
    (tmp_path / "demo-2").mkdir()
    (tmp_path / "demo-2/.job.json").write_text("{}")
    (only,) = find_runs(tmp_path)
    assert (only.id, only.job, only.problem) == (
        "demo-1",
        None,
        f"{str(tmp_path / 'demo-1')!r} has no job.json, so its job is not known; restore that "
        "file, or submit a job whose model is one of the remaining checkpoints",
    )


# --- a checkpoint is the model of another job ----------------------------------------------------


def from_checkpoint(job: Job, folder: Path, step: int) -> Job:
    """A job that begins with the checkpoint, named by the link to the newest run."""
    (folder.parent / "by-name").unlink(missing_ok=True)
    (folder.parent / "by-name").symlink_to(folder.name)
    model = folder.parent / f"by-name/checkpoints/step-{step:06d}"
    return job.model_copy(update={"name": "next", "model": str(model)})


async def test_files_are_not_deleted_that_another_job_begins_with(stack: Stack) -> None:
    ended = await stack.run()
    folder = Path(ended.run_dir)
    job = from_checkpoint(stack.job, folder, 8)
    paused = await stack.store.submit(Submission(job, stack.settings.runs_dir))
    await stack.store.pause(paused.id)
    await stack.until(paused.id, "paused")

    refused = await stack.http.delete(f"/v1/jobs/{ended.id}?files=true")
    assert (refused.status_code, refused.json()["detail"]) == (
        409,
        f"{str(folder / 'checkpoints/step-000008')!r} of job {ended.id!r} is used by job "
        f"{paused.id!r}, which is paused; cancel that job, wait for its end, or delete without the "
        "files",
    )
    assert (folder / "checkpoints/step-000008").is_dir()
    await stack.post(f"{paused.id}/cancel")
    assert (await stack.http.delete(f"/v1/jobs/{ended.id}?files=true")).status_code == 200
    assert not folder.exists()


async def test_a_checkpoint_stays_while_another_job_begins_with_it(stack: Stack) -> None:
    others = list[str]()

    async def act(body: TrainStepRequest) -> None:
        folder = stack.settings.runs_dir / body.job_id
        if body.step == 3:
            job = from_checkpoint(stack.job, folder, 2)
            other = await stack.store.submit(Submission(job, stack.settings.runs_dir))
            others.append(other.id)
        if body.step == 7:
            await stack.store.cancel(others[0])

    stack.fakes.fault["train_step"] = act
    checkpoints = CheckpointSpec(every=1, keep_last=1, keep_best=None)
    record = await stack.run(checkpoints=checkpoints)
    assert stack.fakes.kept == {
        1: (), 2: (), 3: (2,), 4: (2,), 5: (2,), 6: (2,), 7: (), 8: (),
    }  # fmt: skip
    said = [event.message for event in await stack.events(record.id)]
    why = (
        f"the checkpoint of step 2 stays until job {others[0]!r} has ended, which is queued and "
        "uses it as a model"
    )
    assert said.count(why) == 1
    left = (stack.folder(record.id).path / "checkpoints").iterdir()
    assert [path.name for path in left] == ["step-000008"]
