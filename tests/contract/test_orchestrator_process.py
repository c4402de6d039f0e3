"""The orchestrator as a process of its own: what a signal does."""

from __future__ import annotations

import asyncio
import signal

import pytest

from services.orchestrator.store.leases import resource
from services.orchestrator.store.store import Store
from shared.errors import Unavailable
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_process import orchestrator_process, start
from tests.support.orchestrator_stack import submit

pytestmark = pytest.mark.slow

job = orchestrator_stack.job  # a fixture


async def test_sigterm_frees_job_and_trainer_at_once_though_followers_are_connected(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes = FakeServices(settings)
    training = fakes.hold("train_step")
    async with (
        fakes.running(settings) as settings,
        orchestrator_process(settings, redis_url) as running,
    ):
        client = running.client
        record = await submit(client, job)
        follower = asyncio.create_task(_follow(client, record.id))
        await training.arrival()
        running.process.send_signal(signal.SIGTERM)
        store = Store(redis_url)
        async with asyncio.timeout(4):  # less than the grace of requests, far less than the lease
            while await store.status(record.id) != "queued":
                await asyncio.sleep(0.02)
            assert await store.take("another", resource(settings.trainer_url), 30) is not None
        assert await asyncio.wait_for(running.process.wait(), 60) in (0, -signal.SIGTERM)
        await asyncio.wait_for(follower, 60)
        training.released.set()
        await store.close()


async def _follow(client: Client, job_id: str) -> None:
    try:
        async for _ in client.events(f"/v1/jobs/{job_id}/events"):
            pass
    except Unavailable:
        pass  # the connection ends with the process


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://127.0.0.1", "redis://h:port/0"])
async def test_a_url_that_is_no_redis_is_one_sentence(url: str) -> None:
    process = await start(url, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    assert (process.returncode, len(said.splitlines())) == (2, 1)
    assert b"HONE_REDIS_URL is not the URL of a Redis" in said
