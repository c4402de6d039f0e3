"""Outages: no job is taken while what it needs is unreachable, and none is paused or failed by
one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.jobs import needs, recovery, worker
from services.orchestrator.store.store import Store
from shared.errors import BadRequest, StateLost
from shared.host.processes import free_port
from shared.http import ownership
from shared.job import Job
from shared.settings import Settings
from shared.wire import JobRecord
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.link import Link
from tests.support.orchestrator_stack import Stack, full_stack

pytestmark = pytest.mark.slow

job = orchestrator_stack.job  # fixture

SERVICES = ("reward", "trainer", "rollout")


class Outage:
    """A stack whose services can be cut off."""

    def __init__(self, stack: Stack, links: dict[str, Link]) -> None:
        self.stack = stack
        self.links = links

    async def until(self, job_id: str, is_so: Callable[[JobRecord], object]) -> JobRecord:
        """Returns the job once it is so; it must neither pause nor fail before."""
        async with asyncio.timeout(90):
            while not is_so(record := await self.stack.get(job_id)):
                assert record.status in ("queued", "running"), record.error
                await asyncio.sleep(0.02)
        return record


@pytest.fixture
async def outage(
    settings: Settings, redis_url: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Outage]:
    monkeypatch.setattr(needs, "LOOK_AT_NEEDS_S", 0.05)
    monkeypatch.setattr(worker, "HELD_S", 0.2)
    monkeypatch.setattr(worker, "REGISTER_TRAINER_S", 0.05)
    monkeypatch.setattr(recovery, "PAUSES_S", (0.0,))
    monkeypatch.setattr(recovery, "LOOK_AT_MISSING_S", 0.05)
    fakes = FakeServices(settings)
    async with fakes.running(settings) as direct, contextlib.AsyncExitStack() as opened:
        links: dict[str, Link] = {}
        urls: dict[str, Any] = {"patience_s": 0.2}
        for name in SERVICES:
            at, port = free_port(), int(getattr(direct, f"{name}_url").rpartition(":")[2])
            links[name] = await opened.enter_async_context(Link(port, at))
            urls[f"{name}_url"] = f"http://127.0.0.1:{at}"
        behind = direct.model_copy(update=urls)
        async with full_stack(fakes, behind, redis_url, job) as stack:
            yield Outage(stack, links)


def reading(job: Job, volume: Path) -> Job:
    """Returns a short job whose data is in a folder of its own, which is made."""
    volume.mkdir()
    rows = "".join(json.dumps({"prompt": f"{i}?", "answer": i}) + "\n" for i in range(20))
    (volume / "train.jsonl").write_text(rows)
    given = job.model_dump(exclude={"evaluation"})
    return Job.model_validate(given | {"steps": 2, "data": {"train": str(volume / "train.jsonl")}})


@pytest.mark.parametrize("service", ["trainer", "rollout"])
async def test_no_job_is_taken_while_a_service_is_unreachable(outage: Outage, service: str) -> None:
    """Also where there is one trainer only: the queue would drain into paused jobs."""
    stack = outage.stack
    outage.links[service].cut()
    jobs = [await stack.submit(stack.job.model_copy(update={"steps": 2})) for _ in range(2)]
    for each in jobs:
        found = await outage.until(each.id, lambda record: record.waits_for)
        (obstacle,) = found.waits_for.values()
        assert obstacle.away and f"cannot reach the {service} service" in obstacle.away
        assert (found.status, found.attempts) == ("queued", 0)
    outage.links[service].mend()
    for each in jobs:
        assert (await stack.until(each.id)).status == "succeeded"


@pytest.mark.parametrize("service", SERVICES)
async def test_a_running_job_keeps_its_place_while_a_service_is_unreachable(
    outage: Outage, service: str
) -> None:
    stack = outage.stack
    routes = {"reward": "score", "trainer": "train_step", "rollout": "generate"}

    async def cut(_: Any) -> None:
        if stack.fakes.step == 3:
            stack.fakes.fault.clear()
            outage.links[service].cut()

    stack.fakes.fault[routes[service]] = cut
    first = await stack.submit()
    behind = await stack.submit(stack.job.model_copy(update={"steps": 2}))
    waiting = await outage.until(first.id, lambda record: record.waits)
    assert waiting.status == "running" and service in str(waiting.waits)
    await asyncio.sleep(1.0)  # five times as long as a call is patient
    assert (await stack.get(behind.id)).status == "queued"
    outage.links[service].mend()
    done = await stack.until(first.id)
    assert (done.status, done.attempts, done.waits) == ("succeeded", 1, None)
    assert [row.step for row in stack.folder(first.id).metrics()] == list(range(9))
    assert (await stack.until(behind.id)).status == "succeeded"


async def test_a_job_whose_volume_is_not_mounted_waits_and_lets_others_go_first(
    outage: Outage, tmp_path: Path
) -> None:
    stack, volume, away = outage.stack, tmp_path / "volume", tmp_path / "away"
    outage.links["trainer"].cut()
    mounted = await stack.submit(reading(stack.job, volume))
    other = await stack.submit(stack.job.model_copy(update={"steps": 2}))
    volume.rename(away)
    outage.links["trainer"].mend()
    assert (await stack.until(other.id)).status == "succeeded"
    found = await outage.until(mounted.id, lambda record: record.waits)
    why = f"data.train cannot be read at '{volume}/train.jsonl': No such file or directory"
    assert (found.status, found.waits, found.attempts) == ("queued", why, 0)
    messages = [event.message for event in await stack.events(mounted.id)]
    assert messages.count(f"waits: {why}") == 1
    away.rename(volume)
    done = await stack.until(mounted.id)
    assert (done.status, done.attempts, done.waits) == ("succeeded", 1, None)


async def test_a_job_does_not_wait_for_what_came_back_while_another_has_the_trainer(
    outage: Outage, tmp_path: Path, redis_url: str
) -> None:
    stack, volume, away = outage.stack, tmp_path / "volume", tmp_path / "away"
    outage.links["trainer"].cut()
    job_id = (await stack.submit(reading(stack.job, volume))).id
    volume.rename(away)
    outage.links["trainer"].mend()
    await outage.until(job_id, lambda record: record.waits)
    training = stack.fakes.hold("train_step")
    other = await stack.submit(stack.job.model_copy(update={"steps": 2}))
    await outage.until(other.id, lambda record: record.status == "running")
    away.rename(volume)
    found = await outage.until(job_id, lambda record: record.waits is None)
    assert (found.status, found.attempts) == ("queued", 0)
    await stack.store.hold(job_id, "what the orchestrator waited for that was killed")
    again = Store(redis_url)
    await again.open()
    assert (await again.get(job_id)).waits is None
    await again.close()
    training.released.set()
    for each in (other.id, job_id):
        assert (await stack.until(each)).status == "succeeded"


async def test_jobs_whose_volume_hangs_let_others_go_first(
    outage: Outage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at a disk that hangs takes all the time that it may."""
    stack, hangs, look = outage.stack, threading.Event(), needs._unreadable

    def hung(path: Path) -> str | None:
        if path.parent.name.startswith("volume"):
            hangs.wait()
        return look(path)

    monkeypatch.setattr(needs, "_unreadable", hung)
    monkeypatch.setattr(needs, "ANSWERS_WITHIN_S", 0.4)
    outage.links["trainer"].cut()
    volumes = [tmp_path / f"volume-{i}" for i in range(4)]
    waiting = [await stack.submit(reading(stack.job, volume)) for volume in volumes]
    other = await stack.submit(stack.job.model_copy(update={"steps": 2}))
    outage.links["trainer"].mend()
    try:
        async with asyncio.timeout(90):
            assert (await stack.until(other.id)).status == "succeeded"
        found = await outage.until(waiting[0].id, lambda record: record.waits)
        assert "its disk gave no answer in 0.4 s" in str(found.waits)
    finally:
        hangs.set()
    for each in waiting:
        assert (await stack.until(each.id)).status == "succeeded"


async def test_a_volume_that_goes_while_its_job_runs_is_waited_for(
    outage: Outage, tmp_path: Path
) -> None:
    stack, volume, away = outage.stack, tmp_path / "volume", tmp_path / "away"

    async def unmount(_: Any) -> None:
        if volume.exists() and stack.fakes.step == 1:
            volume.rename(away)

    job = reading(stack.job, volume).model_copy(update={"steps": 4})
    stack.fakes.fault["train_step"] = unmount
    job_id = (await stack.submit(job)).id
    found = await outage.until(job_id, lambda record: record.waits)
    assert found.status == "running" and "data.train cannot be read" in str(found.waits)
    stack.fakes.fault.clear()
    away.rename(volume)
    done = await stack.until(job_id)
    assert (done.status, done.attempts) == ("succeeded", 1)
    messages = [event.message for event in await stack.events(job_id)]
    assert any(message.startswith("all dependencies are available again") for message in messages)


async def test_a_job_that_waits_keeps_its_trainer_and_sampler_from_other_orchestrators(
    outage: Outage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are free once they heard nothing of the job for a while."""
    heard: set[tuple[str, str | None]] = set()
    hear = ownership.Ownership.hear

    def note(self: ownership.Ownership) -> None:
        who = ownership.asking.get()
        heard.add((self._service, who and who.job_id))
        hear(self)

    monkeypatch.setattr(ownership.Ownership, "hear", note)
    monkeypatch.setattr(recovery, "LOOK_AT_SERVICES_S", 0.05)
    stack, volume, away = outage.stack, tmp_path / "volume", tmp_path / "away"

    async def unmount(_: Any) -> None:
        if volume.exists() and stack.fakes.step == 1:
            volume.rename(away)

    stack.fakes.fault["train_step"] = unmount
    job = reading(stack.job, volume).model_copy(update={"steps": 4})
    job_id = (await stack.submit(job)).id
    await outage.until(job_id, lambda record: "data.train cannot" in str(record.waits))
    heard.clear()
    async with asyncio.timeout(90):
        while not heard >= {("trainer", job_id), ("rollout", job_id)}:
            await asyncio.sleep(0.02)
    stack.fakes.fault.clear()
    away.rename(volume)
    assert (await stack.until(job_id)).status == "succeeded"


async def test_a_folder_of_runs_that_cannot_be_written_is_waited_for(
    outage: Outage, tmp_path: Path
) -> None:
    """A file is in its place: root cannot write that either."""
    stack = outage.stack
    runs, away = stack.settings.runs_dir, tmp_path / "away"

    async def unmount(_: Any) -> None:
        if stack.fakes.step == 3:
            stack.fakes.fault.clear()
            runs.rename(away)
            runs.write_text("no folder")

    stack.fakes.fault["train_step"] = unmount
    first = await stack.submit()
    behind = await stack.submit(stack.job.model_copy(update={"steps": 2}))
    found = await outage.until(first.id, lambda record: record.waits)
    assert found.status == "running" and str(runs) in str(found.waits)
    await asyncio.sleep(0.5)
    runs.unlink()
    away.rename(runs)
    for each in (first, behind):
        done = await stack.until(each.id)
        assert (done.status, done.attempts) == ("succeeded", 1)
    assert [row.step for row in stack.folder(first.id).metrics()] == list(range(9))


@pytest.mark.parametrize(
    ("route", "error"),
    [
        ("validate", BadRequest("a check that this version has, and the other had not")),
        ("model", BadRequest("there is no folder '/models/a' here", code="not_there")),
        ("job", StateLost("the ranks have just started again")),
    ],
)
async def test_trouble_before_the_first_step_fails_no_accepted_job(
    outage: Outage, route: str, error: Exception
) -> None:
    stack, is_checked = outage.stack, route == "validate"
    left = iter([None, error] if is_checked else [error])

    async def trouble(_: Any) -> None:
        if found := next(left, None):
            raise found

    stack.fakes.fault[route] = trouble
    done = await stack.run()
    assert (done.status, done.recoveries, done.error) == ("succeeded", 1, None)


async def test_a_job_ends_without_the_reward_service(outage: Outage, tmp_path: Path) -> None:
    """Nothing is graded any more when the last checkpoint is written."""

    async def cut(_: Any) -> None:
        if outage.stack.fakes.step == 2:
            outage.links["reward"].cut()

    stack = outage.stack
    stack.fakes.fault["checkpoint"] = cut
    done = await stack.run(job=reading(stack.job, tmp_path / "data"))
    assert done.status == "succeeded" and done.summary is not None
    assert sorted(done.summary["versions"]) == ["hone", "python", "rollout", "trainer"]


async def test_an_empty_folder_in_the_place_of_the_volume_of_runs_is_no_folder_of_runs(
    outage: Outage, tmp_path: Path
) -> None:
    """As when the volume is not mounted: no run folder was deleted, and nothing is made there."""
    stack = outage.stack
    runs, away = stack.settings.runs_dir, tmp_path / "away"

    async def unmount(_: Any) -> None:
        if stack.fakes.step == 3:
            stack.fakes.fault.clear()
            runs.rename(away)
            runs.mkdir()

    stack.fakes.fault["train_step"] = unmount
    first = await stack.submit()
    behind = await stack.submit(stack.job.model_copy(update={"steps": 2}))
    found = await outage.until(first.id, lambda record: record.waits)
    assert found.status == "running" and "is its volume mounted?" in str(found.waits)
    await asyncio.sleep(0.5)
    assert [path for path in runs.iterdir() if ".probe" not in path.name] == []
    runs.rename(tmp_path / "empty")
    away.rename(runs)
    for each in (first, behind):
        done = await stack.until(each.id)
        assert (done.status, done.attempts) == ("succeeded", 1)
