"""What is said of services that do not answer, and of a Redis that was away in mid-job."""

from __future__ import annotations

import asyncio
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from deploy.supervisor import redis_command, redis_socket
from services.orchestrator.jobs import attempt as run
from services.orchestrator.jobs import worker
from services.orchestrator.samplers import services as services_module
from services.orchestrator.samplers.services import Services
from services.orchestrator.samplers.status import Caller
from shared.errors import HoneError
from shared.host.processes import free_port
from shared.http import connecting
from shared.job import Job
from shared.settings import Settings
from shared.wire import TERMINAL, EventList, JobRecord
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_stack import Stack, orchestrator_client, submit

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures


CONTINUES = "the job continues: there was an answer again"


async def test_a_stall_is_an_event_that_names_who_waits_for_whom(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall_s = 2.0  # longer than a busy machine needs for any other answer
    monkeypatch.setattr(run, "STALL_S", stall_s)

    async def messages(job_id: str) -> list[str]:
        return [event.message for event in await stack.events(job_id)]

    async def hang(body: Any) -> None:
        if body.step == 2:
            async with asyncio.timeout(90):
                while not any(map(is_stall, await messages(body.job_id))):
                    await asyncio.sleep(0.05)
            await asyncio.sleep(stall_s)  # it is told once, however long it takes
        if body.step == 3:  # the other steps may take less time than from one look to the next
            async with asyncio.timeout(90):
                while CONTINUES not in await messages(body.job_id):
                    await asyncio.sleep(0.05)

    stack.fakes.fault["train_step"] = hang
    record = await stack.run()
    assert (record.status, record.recoveries) == ("succeeded", 0)
    told = await messages(record.id)
    (stall,) = filter(is_stall, told)
    assert re.search(r"no progress for \d+ s: it waits for trainer: 1 x training a step", stall)
    assert re.search(r"reward grading a group \d+ s ago", stall)
    assert CONTINUES in told[told.index(stall) :]


def is_stall(message: str) -> bool:
    """Of the step that the test holds: on a busy machine others may stall, too."""
    return message.startswith("no progress for ") and "training a step" in message


async def test_a_loop_that_waits_for_nothing_is_begun_again(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "STALL_S", 1.0)
    stuck: list[object] = []
    append_sync = run.RunFolder.append_sync

    def hang_once(self: run.RunFolder, row: dict[str, Any]) -> None:
        if row["version"] == 2 and not stuck:
            stuck.append(row)
            release.wait(60)
        append_sync(self, row)

    async def watch_and_release(*rest: Any) -> None:
        try:
            await watch(*rest)
        finally:
            release.set()

    watch, release = run.watch, threading.Event()
    monkeypatch.setattr(run, "watch", watch_and_release)
    monkeypatch.setattr(run.RunFolder, "append_sync", hang_once)
    job_id = (await stack.submit()).id
    record = await stack.until(job_id)
    assert record.status == "succeeded" and record.recoveries
    *_, why = await stack.warnings(job_id)
    assert ": nothing is under way; last answered: " in why.message


async def test_a_service_that_died_while_it_had_nothing_to_do_is_told_within_seconds(
    settings: Settings, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "AWAY_S", 0.2)
    monkeypatch.setattr(services_module, "PRESENCE_DEADLINE_S", 1.5)
    told: list[str] = []

    async def tell(message: str, _away: bool) -> None:
        told.append(message)

    fakes = FakeServices(settings)
    async with fakes.running(settings) as running:
        nobody = f"http://127.0.0.1:{free_port()}"
        where = running.model_copy(update={"reward_url": nobody})
        services = Services.of(Caller(job, where, tell=tell))
        with services.status.on("reward", "grading a group"):
            await services.look()
        assert told == [], "a job that waits for it would say so"
        await services.look()
        await services.close()
    assert [message[: len("the reward service is unreachable since ")] for message in told] == [
        "the reward service is unreachable since "
    ]


class Redis:
    """A real redis-server that can be killed, and started again from its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self.url = f"unix://{redis_socket(folder)}"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        command = redis_command(self._folder)
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not redis_socket(self._folder).exists():
            await asyncio.sleep(0.01)

    def kill(self) -> None:
        assert self._process
        self._process.kill()
        self._process.wait()
        redis_socket(self._folder).unlink(missing_ok=True)


async def test_a_redis_killed_in_mid_job_that_comes_back_needs_no_operator(
    settings: Settings, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "AWAY_S", 0.2)
    monkeypatch.setattr(worker, "PAUSE_S", 0.1)
    redis, fakes = Redis(tmp_path / "redis"), FakeServices(settings)
    reached = asyncio.Event()

    async def wait(body: Any) -> None:
        if body.step == 3 and not reached.is_set():
            reached.set()
            await asyncio.sleep(0.2)

    fakes.fault["train_step"] = wait
    await redis.start()
    async with (
        fakes.running(settings.model_copy(update={"lease_s": 5.0})) as settings,
        orchestrator_client(settings, redis.url) as client,
    ):
        record = await submit(client, job)
        await asyncio.wait_for(reached.wait(), 60)
        redis.kill()
        await asyncio.sleep(2.0)
        await redis.start()
        async with asyncio.timeout(90):
            while True:
                try:
                    found = await client.get(f"/v1/jobs/{record.id}", JobRecord)
                    if found.status in TERMINAL:
                        break
                except HoneError:
                    pass
                await asyncio.sleep(0.05)
        events = (await client.get(f"/v1/jobs/{record.id}/events", EventList)).events
    redis.kill()
    assert found.status == "succeeded"
    assert [body.step for body in fakes.trained] == list(range(1, 9)), "none lost, none twice"
    back = [e.message for e in events if e.message.startswith("the Redis service is back after ")]
    assert len(back) == 1
