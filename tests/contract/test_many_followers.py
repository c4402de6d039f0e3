"""A thousand jobs in the queue and a hundred clients that follow one: lists stay fast, and no
follower misses an event or gets one twice, however often it connects again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator

import pytest

from services.orchestrator.queue.store import Store
from shared.client import Client
from shared.config import Settings
from shared.job import Job
from shared.wire import EventList, JobList, JobRecord, SubmitRequest, VersionInfo
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.running import free_port

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

job = orchestrator_stack.job  # a fixture

NUM_JOBS = 1000
NUM_FOLLOWERS = 100
NUM_STEPS = 60
RECONNECTS = 0.1
"""Probability of breaking the connection after an event."""

MOST_S = 0.05
"""The median of the time that a list may take."""


@contextlib.asynccontextmanager
async def orchestrator(settings: Settings, redis_url: str) -> AsyncGenerator[str]:
    """The orchestrator as a process of its own; yields its URL."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.orchestrator",
        env={
            **os.environ,
            "HONE_REDIS_URL": redis_url,
            "HONE_ORCHESTRATOR_PORT": str(port),
            "HONE_ROLLOUT_URL": settings.rollout_url,
            "HONE_TRAINER_URL": settings.trainer_url,
            "HONE_REWARD_URL": settings.reward_url,
            "HONE_RUNS_DIR": str(settings.runs_dir),
            "HONE_LOG_LEVEL": "warning",
        },
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)


async def followed(url: str, job_id: str, rng: random.Random) -> tuple[list[str], int]:
    """Returns the ids of all events of the job, as one follower got them, and how often it had to
    connect."""
    ids: list[str] = []
    num_connections = 0
    async with Client("orchestrator", url) as client:
        while True:
            num_connections += 1
            events = client.events(f"/v1/jobs/{job_id}/events", last_id=ids[-1] if ids else None)
            async with contextlib.aclosing(events):
                async for id, kind, _ in events:
                    if kind == "end":
                        return ids, num_connections
                    ids.append(id)
                    if rng.random() < RECONNECTS:
                        break


async def list_seconds(url: str, query: str, stop: asyncio.Event) -> list[float]:
    seconds: list[float] = []
    async with Client("orchestrator", url) as client:
        while not stop.is_set():
            began = time.perf_counter()
            await client.get(f"/v1/jobs?{query}", JobList)
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(0.1)
    return seconds


async def test_lists_are_fast_and_followers_miss_nothing(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes, store = FakeServices(settings), Store(redis_url)
    queries = ("", "status=queued&metadata[team]=t7", "limit=1000")
    async with (
        fakes.running(settings) as own,
        orchestrator(own, redis_url) as url,
        Client("orchestrator", url) as client,
    ):
        await client.get("/version", VersionInfo, deadline_s=60)
        body = SubmitRequest(job=job.model_copy(update={"steps": NUM_STEPS}))
        first = await client.call("POST", "/v1/jobs", body, JobRecord, deadline_s=60)
        for number in range(NUM_JOBS):
            tagged = job.model_copy(update={"metadata": {"team": f"t{number % 10}"}})
            await store.submit(tagged, settings.runs_dir, None)
        stop = asyncio.Event()
        listing = [asyncio.create_task(list_seconds(url, query, stop)) for query in queries]
        following = [
            followed(url, first.id, random.Random(number)) for number in range(NUM_FOLLOWERS)
        ]
        found = await asyncio.gather(*following)
        stop.set()
        medians = [statistics.median(await task) for task in listing]
        events = await all_events(client, first.id)
    await store.close()
    connections = sum(count for _, count in found)
    print(f"{len(events)} events to each of {NUM_FOLLOWERS} followers by {connections} connections")
    for query, median in zip(queries, medians, strict=True):
        print(f"GET /v1/jobs?{query}: median {median * 1000:.1f} ms")
    assert len(events) > NUM_STEPS and connections > 3 * NUM_FOLLOWERS
    assert all(ids == events for ids, _ in found)
    assert medians[0] < MOST_S and medians[1] < MOST_S


async def all_events(client: Client, job_id: str) -> list[str]:
    ids: list[str] = []
    after = "0"
    while page := (await client.get(f"/v1/jobs/{job_id}/events?after={after}", EventList)).events:
        ids += [event.id for event in page]
        after = ids[-1]
    return ids
