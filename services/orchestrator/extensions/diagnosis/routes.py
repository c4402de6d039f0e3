"""What is wrong with a job, and why its sampler and trainer disagree."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import Request
from fastapi.responses import Response

from services.orchestrator.extensions.diagnosis.experiments import report
from services.orchestrator.extensions.diagnosis.known import Findings
from services.orchestrator.extensions.diagnosis.probing import probe
from services.orchestrator.samplers.discovery import sampler_urls
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.reading import Readable
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import all_of
from shared.errors import Conflict
from shared.http import rendering
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import ExperimentReport, FindingList


def add_reading(service: Service, store: Readable) -> None:
    known = Findings(store)

    @service.app.get("/v1/jobs/{job_id}/findings")
    async def findings(job_id: str) -> FindingList:
        """What is wrong with the job, or probably is, the worst first; empty if nothing is."""
        return await known.of(job_id)


def add_experiments(service: Service, settings: Settings, store: Store) -> None:
    given = rendering.answers(ExperimentReport) | rendering.accepted()

    @service.app.post("/v1/jobs/{job_id}/experiments", response_model=None, responses=given)
    async def experiments(job_id: str, request: Request) -> Response:
        """Compares each sampler that serves the job with the trainer, by small experiments, and
        returns which causes of a mismatch they leave. Changes nothing; sampling waits while a
        sampler's tensors are read back."""
        record = await store.get(job_id)
        folder = RunFolder(Path(record.run_dir))
        key = request.headers.get("idempotency-key")
        operation = service.operations.start(
            lambda: _run(settings, store, job_id, folder),
            f"experiments {job_id} {key}" if key else None,
            "{}",
            f"experiments of {job_id}",
        )
        return await service.answer(operation, request)


async def _run(
    settings: Settings, store: Store, job_id: str, folder: RunFolder
) -> ExperimentReport:
    newest = await asyncio.to_thread(folder.proof)
    if newest is None:
        raise Conflict(f"job {job_id!r} has brought no weights with a canary to a sampler yet")
    urls = await sampler_urls(settings.rollout_urls, store.samplers.urls)
    of_all = await all_of(probe(url, settings, job_id, newest) for url in urls)
    experiments = [one for of_one in of_all for one in of_one]
    if not experiments:
        raise Conflict(
            f"no sampler serves job {job_id!r} now: experiments need its weights, until another "
            "job takes the samplers"
        )
    return report(job_id, newest.version, experiments)
