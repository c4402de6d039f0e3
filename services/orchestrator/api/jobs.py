"""Submitting jobs, looking at them, and changing what becomes of them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Query
from pydantic import ValidationError

from services.orchestrator.data.preview import preview
from services.orchestrator.loop.colocation import check_colocation
from services.orchestrator.loop.peers import Peers
from services.orchestrator.loop.prompts import Prompts, load_prompts
from services.orchestrator.queue.store import Store
from services.orchestrator.record.folder import RunFolder
from services.orchestrator.record.noting import cancel
from shared import codec
from shared.config import Settings
from shared.errors import BadRequest, Failed, Unavailable
from shared.explain import sentences
from shared.job import Job
from shared.job_file import changed
from shared.models import model_folder
from shared.service import Service, request_key
from shared.wire import (
    CreateFineTuningJob,
    DryRun,
    JobDeleted,
    JobList,
    JobRecord,
    JobState,
    Prompt,
    ResumeRequest,
    SubmitRequest,
)


def add_routes(service: Service, settings: Settings, store: Store) -> None:
    async def submit(request: SubmitRequest) -> JobRecord:
        """Accepts a job once its data, rewards and model have been checked. Accepted, it is on
        disk."""
        prompts = await check_job(request.job, settings)
        return await store.submit(
            request.job, settings.runs_dir, request_key.get(), prompts.versions
        )

    async def dry_run(request: SubmitRequest) -> DryRun:
        """Checks a job as a submission does, and shows its first prompts. Nothing is submitted."""
        prompts = await check_job(request.job, settings)
        return await asyncio.to_thread(_dry_run, request.job, prompts)

    service.operation("POST", "/v1/jobs", submit, durable=True)
    service.operation("POST", "/v1/jobs/dry_run", dry_run)
    app = service.app

    @app.get("/v1/jobs")
    async def list_jobs(
        after: str | None = None, limit: Annotated[int, Query(ge=1, le=1000)] = 50
    ) -> JobList:
        """Jobs, newest first."""
        return await store.list(after, limit)

    @app.get("/v1/jobs/{job_id}")
    async def get_job(job_id: str) -> JobRecord:
        """One job."""
        return await store.get(job_id)

    @app.delete("/v1/jobs/{job_id}")
    async def delete_job(job_id: str, files: bool = False) -> JobDeleted:
        """Forgets a job that has ended, with its events; another one has to be cancelled first. Its
        run folder, with the checkpoints in it, stays unless `files` is true."""
        run_dir = await store.ended_run_dir(job_id)
        if run_dir:
            folder = RunFolder(run_dir)
            await asyncio.to_thread(folder.remove if files else folder.mark_deleted)
        deleted = await store.delete(job_id)
        return deleted.model_copy(update={"files": files})

    @app.post("/v1/jobs/{job_id}/cancel")
    async def cancel_job(job_id: str) -> JobState:
        """Cancels a queued or paused job now, a running one within seconds."""
        return await cancel(store, job_id)

    @app.post("/v1/jobs/{job_id}/pause")
    async def pause_job(job_id: str) -> JobState:
        """Pauses a queued job now, a running one within seconds. The worker is then free for the
        next job."""
        return await store.pause(job_id)

    @app.post("/v1/jobs/{job_id}/resume")
    async def resume_job(job_id: str, request: ResumeRequest | None = None) -> JobState:
        """Queues a paused job again. It goes on where it was, with other memory settings, steps and
        the like if the body says so."""
        if request is None or not request.set:
            return await store.resume(job_id)
        record = await store.get(job_id)
        job = changed(record.job, request.set)
        if job.steps < record.step:
            raise BadRequest(f"steps: got {job.steps}, but {record.step} are done")
        return await store.resume(job_id, job)


async def check_job(job: Job, settings: Settings) -> Prompts:
    """Returns the job's prompts. Raises HoneError for what would fail the job later, or let it
    learn nothing: data that cannot be read, a model folder that is not one, groups of one, rewards
    that the reward service does not know or that need columns the data lacks."""
    if job.sampling.group_size == 1:
        raise BadRequest(
            "sampling.group_size is 1: a lone completion has nothing to be compared with; expected "
            "2 or more"
        )
    if job.request:
        _check_request(job)
    check_colocation(job, settings)
    model_folder(job.model)
    prompts = await asyncio.to_thread(load_prompts, job, settings)
    first = await asyncio.to_thread(_check_prompts, prompts)
    peers = Peers(job, settings.slots[0])
    try:
        await peers.validate_rewards(prompts.columns, first)
        return prompts
    except Failed as error:
        raise Unavailable(error.detail) from error
    finally:
        await peers.close()


def _check_prompts(prompts: Prompts) -> tuple[Prompt, ...]:
    """Makes the first step's and all held-out prompts, and tries whether they can be sent. Returns
    the first step's."""
    first = prompts.for_step(1)
    for data, several in (("data.train", first), ("data.eval", prompts.held_out())):
        for prompt in several:
            _check_sendable(prompt, data)
    return first


def _check_sendable(prompt: Prompt, data: str) -> None:
    """Raises BadRequest with the row, and the column if it is that."""
    try:
        codec.encode(prompt, codec.MSGPACK)
    except BadRequest as error:
        at = f"row {prompt.index} of {data}"
        for name, value in prompt.row.items():
            _check_value(name, value, at)
        raise BadRequest(f"{at}, its prompt: {error.detail}") from error


def _check_value(name: str, value: Any, at: str) -> None:
    try:
        codec.encode(Prompt(index=0, content="", row={name: value}), codec.MSGPACK)
    except BadRequest as error:
        raise BadRequest(f"{at}, column {name!r}: {error.detail}") from error


def _check_request(job: Job) -> None:
    """Raises BadRequest for a request of OpenAI's API that this API could not show again."""
    try:
        CreateFineTuningJob.model_validate(job.request)
    except ValidationError as error:
        faults = sentences(error, CreateFineTuningJob, "'job.request'")
        raise BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults) from error


def _dry_run(job: Job, prompts: Prompts) -> DryRun:
    shown, why = preview(job, prompts.for_step(1))
    return DryRun(
        job=job,
        columns=prompts.columns,
        num_train=prompts.num_train,
        num_held_out=prompts.num_held_out,
        data=prompts.versions,
        prompts=shown,
        not_counted=why,
    )
