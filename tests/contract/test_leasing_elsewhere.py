"""Two orchestrators of one Redis, of which one runs the job: what a worker at the other one is
told."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import pytest

from services.orchestrator.app import create_service
from services.orchestrator.store.store import Store
from shared.job import Job
from shared.job.file import make_job
from tests.support import orchestrator_stack
from tests.support.in_process import in_process
from tests.support.orchestrator_stack import Stack

stack = orchestrator_stack.stack  # a fixture


@pytest.fixture
def job() -> Job:
    document = {
        "name": "agents",
        "model": "owner/model",
        "steps": 1,
        "data": {"train": [{"prompt": f"{n}?"} for n in range(4)]},
        "environment": {"kind": "worker"},
        "sampling": {"prompts_per_step": 1, "group_size": 2},
    }
    return make_job(document, (), "test")


async def lease(http: httpx.AsyncClient, job_id: str | None = None) -> Any:
    body = {"worker": "w1", **({"job_id": job_id} if job_id else {})}
    answer = await http.post("/v1/episodes/lease", json=body)
    return answer.status_code, answer.json()


async def test_a_worker_at_another_orchestrator_is_told_so(stack: Stack, redis_url: str) -> None:
    record = await stack.submit()
    body = {"worker": "w1", "job_id": record.id, "wait_s": 15}
    leased = (await stack.http.post("/v1/episodes/lease", json=body)).json()
    assert len(leased["episodes"]) == 1
    store = Store(redis_url)
    await store.open()
    elsewhere = create_service(stack.settings, store, works=False)
    async with in_process(elsewhere.app) as http:
        status, told = await lease(http, record.id)
        trainer = (await stack.get(record.id)).trainer
        assert status == 503 and told["detail"].startswith(
            f"job {record.id!r} is run by another orchestrator, which has the trainer at {trainer}"
        )
        assert await lease(http) == (200, {"episodes": []})
        assert await lease(http, "agents-0") == (200, {"episodes": []}), "no such job"
        await stack.post(f"{record.id}/cancel")
        await stack.until(record.id)
        assert await lease(http, record.id) == (200, {"episodes": []})
    await store.close()
    assert await lease(stack.http, record.id) == (200, {"episodes": []})
