"""A thousand jobs in the queue and a hundred clients that follow one: lists stay fast, and no
follower misses an event or gets one twice, however often it connects again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time

import pytest

from services.orchestrator.store.records import Submission
from services.orchestrator.store.store import Store
from shared.errors import Unavailable
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings
from shared.wire import EventList, JobList
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_process import orchestrator_process
from tests.support.orchestrator_stack import submit

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

job = orchestrator_stack.job  # a fixture

NUM_JOBS = 1000
NUM_FOLLOWERS = 100
NUM_STEPS = 60
RECONNECTS = 0.1
"""Probability of breaking the connection after an event."""

NUM_LISTS = 50

MOST_S = 0.05
"""What a tenth of the lists must take less than, with all followers waiting for the next event: the
others may have waited for other work of the machine."""


async def follow(url: str, job_id: str, rng: random.Random, ids: list[str]) -> int:
    """Adds the ids of all events of the job to `ids`, as one follower gets them, and returns how
    often it had to connect."""
    num_connections = 0
    async with Client("orchestrator", url) as client:
        while True:
            num_connections += 1
            events = client.events(f"/v1/jobs/{job_id}/events", last_id=ids[-1] if ids else None)
            with contextlib.suppress(Unavailable):  # its connection was cut
                async with contextlib.aclosing(events):
                    async for id, kind, _ in events:
                        if kind == "end":
                            return num_connections
                        ids.append(id)
                        if rng.random() < RECONNECTS:
                            break


async def list_s(client: Client, query: str) -> list[float]:
    """Returns the seconds that a list takes, the least first."""
    seconds: list[float] = []
    for _ in range(NUM_LISTS):
        began = time.perf_counter()
        await client.get(f"/v1/jobs?{query}", JobList)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)


async def test_lists_are_fast_and_followers_miss_nothing(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes, store = FakeServices(settings), Store(redis_url)
    queries = ("", "status=queued&metadata[team]=t7", "limit=1000")
    halfway = fakes.hold("train_step", lambda body: body.step == NUM_STEPS // 2)
    async with (
        fakes.running(settings) as own,
        orchestrator_process(own, redis_url) as orchestrator,
    ):
        client, url = orchestrator.client, orchestrator.url
        first = await submit(client, job.model_copy(update={"steps": NUM_STEPS}))
        for number in range(NUM_JOBS):
            tagged = job.model_copy(update={"metadata": {"team": f"t{number % 10}"}})
            await store.submit(Submission(tagged, settings.runs_dir))
        found: list[list[str]] = [[] for _ in range(NUM_FOLLOWERS)]
        following = [
            asyncio.create_task(follow(url, first.id, random.Random(number), ids))
            for number, ids in enumerate(found)
        ]
        await halfway.reached.wait()
        so_far = await all_events(client, first.id)
        while not all(ids == so_far for ids in found):
            await asyncio.sleep(0.1)
        seconds = [await list_s(client, query) for query in queries]
        halfway.released.set()
        connections = sum(await asyncio.gather(*following))
        events = await all_events(client, first.id)
    await store.close()
    print(f"{len(events)} events to each of {NUM_FOLLOWERS} followers by {connections} connections")
    for query, taken in zip(queries, seconds, strict=True):
        median, least = statistics.median(taken) * 1000, taken[NUM_LISTS // 10] * 1000
        print(f"GET /v1/jobs?{query}: median {median:.1f} ms, a tenth under {least:.1f} ms")
    assert len(events) > NUM_STEPS and connections > 3 * NUM_FOLLOWERS
    assert all(ids == events for ids in found)
    assert all(taken[NUM_LISTS // 10] < MOST_S for taken in seconds[:2])


async def all_events(client: Client, job_id: str) -> list[str]:
    ids: list[str] = []
    after = "0"
    while page := (await client.get(f"/v1/jobs/{job_id}/events?after={after}", EventList)).events:
        ids += [event.id for event in page]
        after = ids[-1]
    return ids
