"""The orchestrator over several fake samplers: what the tests of the pool share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from services.orchestrator.jobs import recovery
from services.orchestrator.samplers import discovery
from services.orchestrator.samplers import pool as pool_module
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings
from shared.wire import Batch, JobRecord
from tests.support.fake_samplers import FakeSampler
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_stack import Stack, orchestrator


class Pool:
    """A stack with several samplers, which `settings` name."""

    def __init__(self, stack: Stack, samplers: Sequence[FakeSampler]) -> None:
        self.stack, self.samplers = stack, samplers

    def batches(self, record: JobRecord) -> list[Batch]:
        folder = self.stack.folder(record.id)
        return [batch for step in folder.batch_steps() if (batch := folder.batch(step))]

    def check_groups(self, record: JobRecord) -> None:
        """Every step has each of its groups once, each by the answer to its own key."""
        job = record.job
        batches = self.batches(record)
        assert [batch.step for batch in batches] == list(range(1, job.steps + 1))
        keys = [group.replica.split(" ")[1] for batch in batches for group in batch.groups]
        places = [key.split(":", 3)[3].rsplit(":", 1)[0] for key in keys]
        assert places == [
            f"{step}:0:{position}"
            for step in range(1, job.steps + 1)
            for position in range(job.sampling.prompts_per_step)
        ]
        assert [request.step for request in self.stack.fakes.trained] == [
            batch.step for batch in batches
        ]

    async def said(self, record: JobRecord, *parts: str) -> list[str]:
        """Returns the job's sentences that have any of the parts."""
        events = await self.stack.events(record.id)
        return [e.message for e in events if any(part in e.message for part in parts)]


@contextlib.asynccontextmanager
async def pool_stack(
    settings: Settings,
    redis_url: str,
    job: Job,
    all_: Sequence[FakeSampler],
    monkeypatch: pytest.MonkeyPatch,
    rollout_url: str | None = None,
) -> AsyncGenerator[Pool]:
    """A stack with these samplers, found at `rollout_url` or at their own URLs. Its job has four
    steps, and looks at its samplers often."""
    monkeypatch.setattr(recovery, "PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(pool_module, "LOOK_AT_AWAY_S", 0.02)
    monkeypatch.setattr(pool_module, "REPLICA_SHARE", 0.02)
    monkeypatch.setattr(discovery, "DISCOVER_S", 0.05)
    quiet = job.model_copy(
        update={
            "data": job.data.model_copy(update={"eval": None}),
            "sampling": job.sampling.model_copy(update={"prompts_per_step": 6}),
            "steps": 4,
        }
    )
    fakes = FakeServices(settings)
    urls = rollout_url or ",".join(sampler.url for sampler in all_)
    async with fakes.running(settings) as running:
        settings = running.model_copy(update={"rollout_url": urls, "patience_s": 10.0})
        async with (
            orchestrator(settings, redis_url) as (store, transport),
            Client("orchestrator", "http://localhost", transport=transport) as client,
        ):
            unused: Any = None
            yield Pool(Stack(fakes, settings, store, client, unused, quiet, transport.app), all_)


async def finished(pool: Pool, job: Job | None = None) -> JobRecord:
    record = await pool.stack.until((await pool.stack.submit(job)).id)
    assert (record.status, record.error) == ("succeeded", None)
    return record
