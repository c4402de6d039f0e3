"""A Redis that lost its data, or is another one: nothing is done in it until an operator has
decided, and `hone recover` rebuilds the jobs from their run folders."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import redis.asyncio as redis

from services.orchestrator.jobs import worker
from services.orchestrator.store import connection
from services.orchestrator.store import store as store_module
from services.orchestrator.store.folder import Note, RunFolder
from services.orchestrator.store.records import find_runs
from services.orchestrator.store.store import Store
from shared.errors import Conflict, Failed
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings
from shared.wire import (
    CheckpointList,
    JobList,
    JobRecord,
    JobState,
    Recovered,
)
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_stack import finish, orchestrator_client, submit
from tests.support.running import running_redis

pytestmark = pytest.mark.slow

job = orchestrator_stack.job  # a fixture


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "PAUSE_S", 0.05)


async def empty(redis_url: str) -> None:
    client = redis.from_url(redis_url)
    await client.flushall()
    await client.aclose()


async def status(client: Client, job_id: str) -> str:
    return (await client.get(f"/v1/jobs/{job_id}", JobRecord)).status


async def listed(client: Client) -> dict[str, str]:
    page = await client.get("/v1/jobs", JobList)
    return {record.id: record.status for record in page.jobs}


async def recover(client: Client) -> Recovered:
    return await client.call("POST", "/v1/recover", None, Recovered, deadline_s=60)


async def change(client: Client, job_id: str, what: str) -> JobState:
    return await client.call("POST", f"/v1/jobs/{job_id}/{what}", None, JobState, deadline_s=30)


async def resume(client: Client, job_id: str) -> JobState:
    return await change(client, job_id, "resume")


async def until(get: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    async with asyncio.timeout(90):
        while await get() != wanted:
            await asyncio.sleep(0.02)


def blocking(fakes: FakeServices, step: int) -> asyncio.Event:
    """The trainer does not answer at that step, until the fault is cleared."""
    reached = asyncio.Event()

    async def block(body: Any) -> None:
        if body.step == step:
            reached.set()
            while fakes.fault:
                await asyncio.sleep(0.01)

    fakes.fault["train_step"] = block
    return reached


async def test_an_emptied_redis_is_refused_and_the_jobs_are_rebuilt_from_their_folders(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes = FakeServices(settings)
    async with fakes.running(settings) as settings:
        async with orchestrator_client(settings, redis_url) as client:
            ended = await finish(client, job)
            reached = blocking(fakes, 3)
            cut_off = await submit(client, job)
            await asyncio.wait_for(reached.wait(), 60)
            checkpoints = Path(ended.run_dir) / "checkpoints"
            (checkpoints / "step-000008/model.safetensors").write_bytes(b"12345")
        await empty(redis_url)
        fakes.fault.clear()
        async with asyncio.timeout(90):
            while fakes.trained[-1].step < 3:  # what the trainer had under way
                await asyncio.sleep(0.01)
        folder = Path(settings.runs_dir) / "broken-1"
        folder.mkdir()
        (folder / "job.json").write_text("{")
        trained = len(fakes.trained)
        async with orchestrator_client(settings, redis_url) as client:
            for call in (lambda: listed(client), lambda: submit(client, job)):
                with pytest.raises(Conflict, match="`hone recover`") as refusal:
                    await call()
                assert refusal.value.code == "emptied"
            assert "(3 run folder(s))" in refusal.value.detail
            found = await recover(client)
            shown = [(each.id, each.status, each.step, each.known) for each in found.jobs]
            assert shown[0] == ("broken-1", None, 0, False)
            assert sorted(shown[1:], key=lambda job: job[2]) == [  # ids of one second: any order
                (cut_off.id, "paused", 2, False),
                (ended.id, "succeeded", 8, False),
            ]
            assert found.jobs[0].problem is not None and "cannot be read" in found.jobs[0].problem
            assert await listed(client) == {ended.id: "succeeded", cut_off.id: "paused"}
            rebuilt = await client.get(f"/v1/jobs/{ended.id}", JobRecord)
            assert (rebuilt.summary, rebuilt.job) == (ended.summary, ended.job)
            assert rebuilt.data == ended.data and set(rebuilt.data) == {"train", "eval"}
            kept = await client.get(f"/v1/jobs/{ended.id}/checkpoints", CheckpointList)
            assert [(each.step, each.size_bytes) for each in kept.checkpoints] == [(8, 5)]
            again = await recover(client)
            assert [each.known for each in again.jobs] == [False, True, True]
            assert len(fakes.trained) == trained, "nothing runs by itself"
            await resume(client, cut_off.id)
            await until(lambda: listed(client), {ended.id: "succeeded", cut_off.id: "succeeded"})
        steps = [body.step for body in fakes.trained if body.job_id == cut_off.id]
        assert steps == list(range(1, 9)), "it continued where it was"
        async with orchestrator_client(settings, redis_url) as client:
            assert len(await listed(client)) == 2, "it is theirs from now on"


async def test_a_redis_whose_file_is_gone_is_refused_until_it_is_back(
    settings: Settings, job: Job, tmp_path: Path
) -> None:
    fakes, folder = FakeServices(settings), tmp_path / "data"
    aside = tmp_path / "aside"
    async with fakes.running(settings) as settings:
        with running_redis(folder) as url:
            async with orchestrator_client(settings, url) as client:
                record = await finish(client, job.model_copy(update={"steps": 1}))
        (file,) = folder.glob("appendonly*")  # a folder since Redis 7
        file.rename(aside)
        with running_redis(folder) as url:
            async with orchestrator_client(settings, url) as client:
                with pytest.raises(Conflict, match="is not the Redis that had the jobs of"):
                    await listed(client)
        file.rename(tmp_path / "empty")
        aside.rename(file)
        with running_redis(folder) as url:
            async with orchestrator_client(settings, url) as client:
                assert await listed(client) == {record.id: "succeeded"}
        with running_redis(tmp_path / "other") as url:
            async with orchestrator_client(settings, url) as client:
                assert await listed(client) == {}, "another stack's, elsewhere"


async def test_a_redis_that_is_emptied_in_mid_job_stops_the_job_at_once(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes = FakeServices(settings)
    reached = blocking(fakes, 3)
    async with (
        fakes.running(settings) as settings,
        orchestrator_client(settings, redis_url) as client,
    ):
        record = await submit(client, job)
        await asyncio.wait_for(reached.wait(), 60)
        await empty(redis_url)

        async def refused() -> bool:
            try:
                return not await listed(client)
            except Conflict as error:
                return "(1 run folder(s))" in error.detail

        await until(refused, True)
        fakes.fault.clear()
        await recover(client)
        assert await listed(client) == {record.id: "paused"}
        assert fakes.trained[-1].step <= 3
        await resume(client, record.id)
        await until(lambda: listed(client), {record.id: "succeeded"})
    assert [body.step for body in fakes.trained] == list(range(1, 9))


async def test_an_emptied_redis_without_run_folders_has_lost_nothing(
    settings: Settings, redis_url: str
) -> None:
    for _ in range(2):
        store = Store(redis_url)
        await store.open()
        assert await store.check(settings.runs_dir) is None
        await store.close()
        await empty(redis_url)


async def test_recovering_is_not_refused_by_a_look_at_the_redis_meanwhile(
    settings: Settings, redis_url: str, job: Job
) -> None:
    stores = Store(redis_url), Store(redis_url)
    settings.runs_dir.mkdir()
    for number in range(8):
        RunFolder(settings.runs_dir / f"demo-{number}").create(job)
    for store in stores:
        await store.open()
    await stores[0].check(settings.runs_dir)
    await empty(redis_url)
    assert await stores[1].check(settings.runs_dir) is not None

    async def look() -> None:
        while True:
            await stores[1].check(settings.runs_dir)

    looking = asyncio.create_task(look())
    try:
        found = await stores[1].recover(find_runs(settings.runs_dir), settings.runs_dir)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        for store in stores:
            await store.close()
    assert [each.status for each in found] == ["paused"] * 8


async def test_jobs_of_another_redis_that_shares_the_folder_are_left_to_it(
    settings: Settings, redis_url: str, job: Job, tmp_path: Path
) -> None:
    with running_redis(tmp_path / "other") as other_url:
        lost, other = Store(redis_url), Store(other_url)
        for store, name in ((lost, "mine-1"), (other, "theirs-1")):
            await store.open()
            assert await store.check(settings.runs_dir) is None
            RunFolder(settings.runs_dir / name).create(job, redis=store.identity)
        await empty(redis_url)
        assert await lost.check(settings.runs_dir) is not None
        mine, theirs = await lost.recover(find_runs(settings.runs_dir), settings.runs_dir)
        for store in (lost, other):
            await store.close()
    assert (mine.id, mine.status) == ("mine-1", "paused")
    assert (theirs.id, theirs.status) == ("theirs-1", None)
    assert theirs.problem and "is a job of another Redis" in theirs.problem


async def test_a_recover_that_broke_off_is_done_again_and_one_bad_folder_ends_none(
    settings: Settings, redis_url: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.runs_dir.mkdir()
    for name in ("demo-1", "demo-2"):
        RunFolder(settings.runs_dir / name).create(job, redis="lost")
    store = Store(redis_url)
    await store.open()

    async def recovered() -> list[tuple[str | None, str | None]]:
        found = await store.recover(find_runs(settings.runs_dir), settings.runs_dir)
        return [(each.status, each.problem) for each in found]

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "set_redis", Mock(side_effect=RuntimeError("it was killed")))
        with pytest.raises(RuntimeError):
            await recovered()
    with monkeypatch.context() as patched:
        full = Mock(side_effect=[Failed("the disk is full"), None])
        patched.setattr(RunFolder, "set_redis", full)
        assert await recovered() == [(None, "the disk is full"), ("paused", None)]
    assert await recovered() == [("paused", None), ("paused", None)]
    assert [run.redis for run in find_runs(settings.runs_dir)] == [store.identity] * 2
    await store.close()


async def test_a_recovered_job_has_ended_as_it_ended_and_keeps_its_age_and_key(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes = FakeServices(settings)
    before: dict[str, JobRecord] = {}
    async with fakes.running(settings) as settings:
        async with orchestrator_client(settings, redis_url) as client:
            reached = blocking(fakes, 2)
            ids = {"running": (await submit(client, job, key="mine")).id}
            await asyncio.wait_for(reached.wait(), 60)
            await change(client, ids["running"], "cancel")
            await until(lambda: status(client, ids["running"]), "cancelled")
            fakes.fault.clear()

            reached = blocking(fakes, 2)
            ids["paused"] = (await submit(client, job)).id
            await asyncio.wait_for(reached.wait(), 60)
            await change(client, ids["paused"], "pause")
            await until(lambda: status(client, ids["paused"]), "paused")
            fakes.fault.clear()
            await change(client, ids["paused"], "cancel")
            for job_id in ids.values():
                before[job_id] = await client.get(f"/v1/jobs/{job_id}", JobRecord)
        await empty(redis_url)
        async with orchestrator_client(settings, redis_url) as client:
            await recover(client)
            for job_id, record in before.items():
                rebuilt = await client.get(f"/v1/jobs/{job_id}", JobRecord)
                for name in ("status", "error", "created_at", "finished_at"):
                    assert getattr(rebuilt, name) == getattr(record, name), (job_id, name)
            assert [record.status for record in before.values()] == ["cancelled", "cancelled"]
            assert (await submit(client, job, key="mine")).id == ids["running"]
            with pytest.raises(Conflict) as refusal:
                await submit(client, job.model_copy(update={"steps": 2}), key="mine")
            assert refusal.value.code == "body_differs"


async def test_ended_jobs_that_were_dropped_are_not_brought_back(
    settings: Settings, redis_url: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "KEEP_JOBS", 2)
    settings.runs_dir.mkdir()
    for number, end in enumerate(("failed", "succeeded", "cancelled")):
        folder = RunFolder(settings.runs_dir / f"demo-{number}")
        folder.create(job)
        at = {"created_at": 10.0 + number, "finished_at": 20.0 + number}
        folder.write_note(Note.model_validate({**at, "status": end}))
    store = Store(redis_url)
    await store.open()
    for _ in range(2):
        found = await store.recover(find_runs(settings.runs_dir), settings.runs_dir)
        shown = [(each.id, each.status) for each in found]
        assert shown == [
            ("demo-0", None),
            ("demo-1", "succeeded"),
            ("demo-2", "cancelled"),
        ]
        assert found[0].problem and "Redis keeps no others" in found[0].problem
    assert [record.created_at for record in (await store.list(None, 10)).jobs] == [12.0, 11.0]
    await store.close()


async def test_an_orchestrator_whose_jobs_were_taken_to_another_redis_leaves_them(
    settings: Settings,
    redis_url: str,
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_place", lambda _: "redis://the-same-name:6379")
    fakes = FakeServices(settings)
    reached = blocking(fakes, 3)
    async with fakes.running(settings) as settings:
        with running_redis(tmp_path / "new") as new_url:
            async with orchestrator_client(settings, redis_url) as old:
                record = await submit(old, job)
                await asyncio.wait_for(reached.wait(), 60)
                async with orchestrator_client(settings, new_url) as new:
                    await recover(new)
                    with pytest.raises(Conflict, match="are in another Redis now"):
                        async with asyncio.timeout(90):
                            while await listed(old):
                                await asyncio.sleep(0.02)
                    fakes.fault.clear()
                    await resume(new, record.id)
                    wanted = {record.id: "succeeded"}
                    await until(lambda: listed(new), wanted)
                assert [body.step for body in fakes.trained] == list(range(1, 9))
            client = redis.from_url(redis_url, decode_responses=True)
            assert await client.hget(f"hone:job:{record.id}", "attempts") == "1"
            await client.aclose()


async def test_a_worker_waits_for_a_folder_of_runs_that_cannot_be_read(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes = FakeServices(settings)
    store = Store(redis_url)
    await store.open()
    await store.check(settings.runs_dir)
    await store.close()
    (note,) = settings.runs_dir.glob(".redis-*")
    said = note.read_text()
    note.unlink()
    note.mkdir()  # reading it is an error, also for root
    async with (
        fakes.running(settings) as settings,
        orchestrator_client(settings, redis_url) as client,
    ):
        record = await submit(client, job)
        await asyncio.sleep(0.2)
        assert await status(client, record.id) == "queued"
        note.rmdir()
        note.write_text(said)
        await until(lambda: status(client, record.id), "succeeded")
