"""The orchestrator's own application over real Redis and HTTP, with fake services behind it: what
its contract tests share.

Test modules take the fixtures `job`, `stack` and `store` from here by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from pydantic import BaseModel

from services.orchestrator.app import create_service
from services.orchestrator.extensions.agents.sessions import Sessions
from services.orchestrator.jobs import recovery
from services.orchestrator.store.folder import Note, RunFolder
from services.orchestrator.store.store import Store
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings
from shared.wire import TERMINAL, Event, EventList, JobRecord, JobState, SubmitRequest
from tests.support.fake_services import FakeServices

FIRST_POLL_S, LAST_POLL_S = 0.1, 0.6
"""Between two requests for a job's record, which take more processor time than a step of the
fakes."""


@dataclass
class Stack:
    fakes: FakeServices
    settings: Settings
    store: Store
    client: Client
    http: httpx.AsyncClient
    job: Job
    app: Any
    """The ASGI application, for clients with transports of their own."""

    @property
    def sessions(self) -> Sessions:
        """The sessions of agents that the orchestrator has."""
        return self.app.state.sessions

    async def submit(self, job: Job | None = None, *, key: str | None = None) -> JobRecord:
        return await submit(self.client, job or self.job, key)

    async def run(self, *statuses: str, job: Job | None = None, **changes: Any) -> JobRecord:
        """Submits the job, with these changes; returns its record at the end, or in one of
        `statuses`."""
        submitted = await self.submit((job or self.job).model_copy(update=changes))
        return await self.until(submitted.id, *statuses)

    async def get(self, job_id: str) -> JobRecord:
        return await self.client.get(f"/v1/jobs/{job_id}", JobRecord)

    async def post(self, path: str, body: BaseModel | None = None) -> JobState:
        return await self.client.call("POST", f"/v1/jobs/{path}", body, JobState, deadline_s=30)

    async def events(self, job_id: str) -> tuple[Event, ...]:
        return (await self.client.get(f"/v1/jobs/{job_id}/events", EventList)).events

    async def warnings(self, job_id: str) -> list[Event]:
        """Returns the job's warnings but for findings about its numbers."""
        return [
            event
            for event in await self.events(job_id)
            if event.level == "warning" and "finding" not in event.data
        ]

    def folder(self, job_id: str) -> RunFolder:
        return RunFolder((self.settings.runs_dir / job_id).resolve())

    async def until(self, job_id: str, *statuses: str) -> JobRecord:
        return await ended(self.client, job_id, *statuses)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    for name, count in (("train", 20), ("test", 4)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{i}?", "answer": i}) + "\n" for i in range(count))
        )
    return Job.model_validate(
        {
            "name": "demo",
            "model": "owner/model",
            "steps": 8,
            "data": {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "test.jsonl")},
            "sampling": {"prompts_per_step": 2, "group_size": 4, "max_tokens": 4},
            "rewards": [{"grader": "exact_match"}],
            "evaluation": {"every": 4},
        }
    )


@pytest.fixture
async def store(redis_url: str) -> AsyncGenerator[Store]:
    """An orchestrator's view of the queue, without the orchestrator."""
    store = Store(redis_url)
    await store.open()
    yield store
    await store.close()


@contextlib.asynccontextmanager
async def orchestrator(
    settings: Settings,
    redis_url: str,
    *,
    stopped: bool = False,
) -> AsyncGenerator[tuple[Store, httpx.ASGITransport]]:
    """The orchestrator's own application with its worker; leaving kills it without letting it give
    its lease back, unless `stopped`."""
    store = Store(redis_url)
    await store.open()
    sessions = Sessions()
    service = create_service(settings, store, sessions=sessions)
    service.app.state.sessions = sessions
    async with service.app.router.lifespan_context(service.app):
        yield store, httpx.ASGITransport(app=service.app)
        if not stopped:
            store.halt = _never  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def orchestrator_client(
    settings: Settings,
    redis_url: str,
    *,
    stopped: bool = False,
) -> AsyncGenerator[Client]:
    """A client of `orchestrator`, for tests that need nothing else of it."""
    async with (
        orchestrator(settings, redis_url, stopped=stopped) as (_, transport),
        Client("orchestrator", "http://localhost", transport=transport) as client,
    ):
        yield client


async def _never(*_: object) -> None:
    """A killed process gives nothing back."""


async def submit(client: Client, job: Job, key: str | None = None) -> JobRecord:
    body = SubmitRequest(job=job)
    return await client.call("POST", "/v1/jobs", body, JobRecord, deadline_s=60, key=key)


async def finish(client: Client, job: Job, *statuses: str) -> JobRecord:
    """Submits the job and returns its record at the end, or in one of `statuses`."""
    return await ended(client, (await submit(client, job)).id, *statuses)


async def ended(client: Client, job_id: str, *statuses: str) -> JobRecord:
    """Returns the job's record at the end, or in one of `statuses`."""
    pause_s = FIRST_POLL_S
    async with asyncio.timeout(90):
        while (found := await client.get(f"/v1/jobs/{job_id}", JobRecord)).status not in (
            statuses or TERMINAL
        ):
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LAST_POLL_S)
    return found


async def until_noted(folder: RunFolder, status: str) -> Note:
    """Returns the run folder's note once it says so: the last that is written of a job."""
    async with asyncio.timeout(90):
        while (note := folder.note()) is None or note.status != status:
            await asyncio.sleep(0.02)
    return note


async def until_ended(store: Store, job_id: str) -> JobRecord:
    """Returns the job's record at the end, as the store has it."""
    async with asyncio.timeout(90):
        while (found := await store.get(job_id)).status not in TERMINAL:
            await asyncio.sleep(FIRST_POLL_S)
    return found


@pytest.fixture
async def stack(
    settings: Settings, redis_url: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Stack]:
    """All of it; recoveries follow each other without a pause."""
    monkeypatch.setattr(recovery, "PAUSES_S", (0.0,))
    monkeypatch.setattr(recovery, "LOOK_AT_MISSING_S", 0.05)
    fakes = FakeServices(settings)
    async with (
        fakes.running(settings) as settings,
        full_stack(fakes, settings, redis_url, job) as stack,
    ):
        yield stack


@contextlib.asynccontextmanager
async def full_stack(
    fakes: FakeServices, settings: Settings, redis_url: str, job: Job
) -> AsyncGenerator[Stack]:
    """The orchestrator before services that run, as `settings` name them."""
    async with orchestrator(settings, redis_url) as (store, transport):
        client = Client("orchestrator", "http://localhost", transport=transport)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=20
        ) as http:
            yield Stack(fakes, settings, store, client, http, job, transport.app)
