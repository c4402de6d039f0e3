"""What finished jobs leave in the orchestrator: nothing that grows with their number."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections import Counter
from pathlib import Path

import pytest

from services.orchestrator.store.records import Submission
from shared.job import Job
from shared.settings import Settings
from shared.wire import TERMINAL, JobList, JobRecord, SubmitRequest
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_process import orchestrator_process
from tests.support.orchestrator_stack import orchestrator

pytestmark = pytest.mark.slow

job = orchestrator_stack.job  # a fixture


def tiny(job: Job) -> Job:
    """One step of two completions."""
    return job.model_copy(
        update={
            "steps": 1,
            "data": job.data.model_copy(update={"eval": None}),
            "sampling": job.sampling.model_copy(update={"prompts_per_step": 1, "group_size": 2}),
        }
    )


OURS = (
    "services.orchestrator.",
    "shared.http.client",
    "shared.http.connecting",
    "shared.http.connecting",
    "httpx",
)
"""Modules of what only the orchestrator makes, and not the fake services beside it."""


def objects_of_ours() -> Counter[str]:
    """Returns how many objects there are of each class."""
    gc.collect()
    kinds = Counter(type(each) for each in gc.get_objects())
    return Counter(
        {
            f"{kind.__module__}.{kind.__qualname__}": count
            for kind, count in kinds.items()
            if str(kind.__module__).startswith(OURS)
        }
    )


async def test_a_job_that_ended_leaves_no_object_behind(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes = FakeServices(settings)

    async def finish(count: int) -> Counter[str]:
        ids = [
            (await store.submit(Submission(tiny(job), settings.runs_dir))).id for _ in range(count)
        ]
        for job_id in ids:
            async with asyncio.timeout(90):
                while (status := await store.status(job_id)) not in TERMINAL:
                    await asyncio.sleep(0.01)
            assert status == "succeeded"
        return objects_of_ours()

    async with (
        fakes.running(settings) as settings,
        orchestrator(settings, redis_url) as (store, _),
    ):
        await finish(2)
        before = await finish(1)
        after = await finish(6)
        for _ in range(50):  # something of the last job may be under way
            if not after - before:
                break
            await asyncio.sleep(0.2)
            after = objects_of_ours()
    assert not after - before


NUM_JOBS = 10_000
BATCH = 250
"""Jobs that are queued at a time."""

MAX_GROWTH_MIB = 24.0
"""Of the process over the last four fifths of the jobs: what its allocator may need."""

MAX_LIST_MS = 50.0


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
async def test_the_memory_stays_flat_and_lists_fast_over_ten_thousand_jobs(
    settings: Settings, redis_url: str, job: Job
) -> None:
    fakes = FakeServices(settings)
    resident_mib: list[float] = []
    async with (
        fakes.running(settings) as settings,
        orchestrator_process(
            settings.model_copy(update={"log_level": "error"}),
            redis_url,
            {"services.orchestrator.store.store.KEEP_JOBS": NUM_JOBS},
        ) as running,
    ):
        client = running.client
        for _ in range(NUM_JOBS // BATCH):
            body = SubmitRequest(job=tiny(job))
            last = None
            for _ in range(BATCH):
                last = await client.call("POST", "/v1/jobs", body, JobRecord, deadline_s=60)
            async with asyncio.timeout(600):
                while last and (await client.get(f"/v1/jobs/{last.id}", JobRecord)).status not in (
                    TERMINAL
                ):
                    await asyncio.sleep(0.2)
            fakes.trained.clear()
            fakes.reloads.clear()
            fakes.aborted.clear()
            resident_mib.append(resident(running.process.pid))
        took_ms: list[float] = []
        for _ in range(20):
            began = time.perf_counter()
            page = await client.get("/v1/jobs?limit=50", JobList)
            took_ms.append((time.perf_counter() - began) * 1000)
            assert len(page.jobs) == 50
    warm = resident_mib[len(resident_mib) // 5]
    print(f"MiB after each {BATCH} jobs: {resident_mib}; list: {statistics.median(took_ms):.1f} ms")
    assert resident_mib[-1] - warm < MAX_GROWTH_MIB
    assert statistics.median(took_ms) < MAX_LIST_MS


def resident(pid: int) -> float:
    """Returns the MiB of memory that the process has."""
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )
    return int(line.split()[1]) / 1024
