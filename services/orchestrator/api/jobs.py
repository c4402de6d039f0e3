"""Submitting, planning, reading, cancelling, pausing, resuming, deleting and recovering jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request

from services.orchestrator.api.access import TOKEN_ONLY
from services.orchestrator.data.hub import named_model_folder
from services.orchestrator.jobs.check_executor import CheckExecutor
from services.orchestrator.jobs.preflight import (
    Preflight,
    Submissions,
    check_held_out,
    check_job,
)
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.lists import JobFilter, Readable
from services.orchestrator.store.records import find_runs
from services.orchestrator.store.run_folders import (
    cancel,
    cancel_if_active,
    check_allowed,
)
from services.orchestrator.store.store import Store
from shared.errors import BadRequest, Conflict
from shared.http import rendering
from shared.http.gate import scope_key
from shared.http.rendering import CreatedResource
from shared.http.service import Service, request_key
from shared.job import Job
from shared.job.file import changed
from shared.plan.model import UnknownModelSize, find_model
from shared.plan.planning import make_plan, planned_gpus
from shared.settings import Settings
from shared.wire import (
    DryRun,
    JobDeleted,
    JobList,
    JobRecord,
    JobState,
    JobStatus,
    NoBody,
    Plan,
    PromptLengths,
    Recovered,
    ResumeRequest,
    SubmitRequest,
    Withdrawn,
    WithdrawRequest,
)

METADATA: dict[str, Any] = {
    "parameters": [
        {
            "name": "metadata",
            "in": "query",
            "style": "deepObject",
            "explode": True,
            "description": "metadata[name]=value leaves only jobs that have it",
            "schema": {"type": "object", "additionalProperties": {"type": "string"}},
            "example": {"team": "math"},
        }
    ]
}
"""The OpenAPI parameter that `metadata_of` reads, for lists of jobs."""


def add_routes(
    service: Service, settings: Settings, store: Store, submissions: Submissions
) -> None:
    _add_submitting(service, settings, submissions)
    add_reading(service, store)
    _add_changing(service, settings, store, submissions.checks)

    async def recover(_: NoBody) -> Recovered:
        """Makes a record for every run folder without one: a job that had ended has ended the same
        way, any other is paused. Accepts the present Redis as the Redis of the jobs. Doing it again
        changes nothing."""
        runs = await asyncio.to_thread(find_runs, settings.runs_dir)
        jobs = await store.recover(runs, settings.runs_dir)
        return Recovered(jobs=tuple(jobs))

    service.operation("POST", "/v1/recover", recover, dependencies=[TOKEN_ONLY])


def _add_submitting(service: Service, settings: Settings, submissions: Submissions) -> None:
    store, checks = submissions.store, submissions.checks

    async def submit(request: SubmitRequest) -> CreatedResource[JobRecord]:
        """Accepts a job once its data, rewards and model have been checked: 201, and it is on disk.
        If its Idempotency-Key was used for this job before: 200, and the present record."""
        record, is_new = await submissions.submit(request.job, request_key.get())
        return CreatedResource[JobRecord](
            body=record, location=f"/v1/jobs/{record.id}", is_new=is_new
        )

    async def withdraw(request: WithdrawRequest) -> Withdrawn:
        """Withdraws the submission with an Idempotency-Key. A submission that is under way or has
        yet to arrive is refused (409); a job that was accepted already is cancelled."""
        job_id = await store.withdraw(scope_key(request.key))
        return Withdrawn(job=await cancel_if_active(store, job_id) if job_id else None)

    async def dry_run(request: SubmitRequest) -> DryRun:
        """Checks a job as a submission does, and shows its first prompts. Nothing is submitted."""
        checked = await check_job(request.job, store, checks, shows=True)
        job, online = checked.completed, checks.hub_away is None
        plan_of = partial(_planned, settings=settings, online=online)
        return await asyncio.to_thread(_dry_run, job, checked, plan_of)

    async def plan(request: SubmitRequest) -> Plan:
        """Says what a job will probably need and cost on HONE_GPUS, or else on this machine's GPUs.
        Reads only the job's model and the lengths of its prompts; other faults in the data are not
        checked."""
        await check_allowed(store, request.job, settings.runs_dir)
        await asyncio.to_thread(named_model_folder, request.job.model, settings)
        lengths = await checks.lengths(request.job)
        try:
            online = checks.hub_away is None
            return await asyncio.to_thread(_planned, request.job, lengths, settings, online=online)
        except UnknownModelSize as error:
            raise BadRequest(str(error)) from error

    service.operation("POST", "/v1/jobs", submit, durable=True)
    service.operation(
        "POST", "/v1/jobs/withdraw", withdraw, key=lambda request: request.key, durable=True
    )
    service.operation("POST", "/v1/jobs/dry_run", dry_run)
    service.operation("POST", "/v1/jobs/plan", plan)


def add_reading(service: Service, store: Readable) -> None:
    app = service.app

    @app.get("/v1/jobs", openapi_extra=METADATA)
    async def list_jobs(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
        status: JobStatus | None = None,
        name: Annotated[str | None, Query(max_length=100)] = None,
        metadata: Annotated[str | None, Query(include_in_schema=False)] = None,
    ) -> JobList:
        """Summaries of jobs, newest first, filtered by status, name and metadata if given."""
        wanted = JobFilter(status=status, name=name, metadata=metadata_of(request))
        return await store.list(after, limit, wanted)

    @app.get("/v1/jobs/{job_id}")
    async def get_job(job_id: str) -> JobRecord:
        """One job."""
        return await store.get(job_id)


def _add_changing(
    service: Service, settings: Settings, store: Store, checks: CheckExecutor
) -> None:
    app = service.app

    @app.delete("/v1/jobs/{job_id}")
    async def delete_job(job_id: str, files: bool = False) -> JobDeleted:
        """Forgets an ended job, with its events; a job that has not ended must be cancelled first.
        Its run folder and checkpoints stay unless `files` is true. With `files` it is refused while
        a job that has not ended begins with a checkpoint or evaluates it."""
        run_dir = await store.ended_run_dir(job_id)
        for use in await store.models_below(run_dir) if run_dir and files else ():
            raise Conflict(
                f"{str(use.path)!r} of job {job_id!r} is used by job {use.job_id!r}, which is "
                f"{use.status}; cancel that job, wait for its end, or delete without the files"
            )
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
    async def resume_job(job_id: str, request: Request) -> JobState:
        """Queues a paused job again. It continues where it was, with other memory settings, steps
        and the like if the body says so."""
        changes = await rendering.read_body(request, ResumeRequest)
        if not changes.set:
            return await store.resume(job_id)
        record = await store.get(job_id)
        job = changed(record.job, changes.set)
        if job.trains and job.steps < max(record.step, 1):
            raise BadRequest(f"steps: got {job.steps}, but {record.step} are done")
        _check_same_kind(record.job, job)
        await check_job(job, store, checks, ("settings",), present=record.job)
        if job.evaluation.sets != record.job.evaluation.sets:
            await checks.run(job, check_held_out, job, settings)
        return await store.resume(job_id, job)

    service.body(ResumeRequest, "POST", "/v1/jobs/{job_id}/resume")


def _dry_run(job: Job, checked: Preflight, plan_of: Callable[[Job, PromptLengths], Plan]) -> DryRun:
    planned, not_planned = None, ""
    data, trial = checked.data, checked.trial
    try:
        planned = plan_of(job, data.lengths)
    except UnknownModelSize as error:
        not_planned = str(error)
    return DryRun(
        job=job,
        columns=data.columns,
        num_train=data.num_train,
        num_held_out=data.num_held_out,
        data=dict(data.versions),
        prompts=data.shown,
        not_counted=data.not_counted,
        plan=planned,
        not_planned=not_planned,
        warnings=tuple(checked.warnings),
        trial=(trial.summary, *trial.warnings) if trial else (),
    )


def _planned(job: Job, lengths: PromptLengths, settings: Settings, *, online: bool) -> Plan:
    model = find_model(job.model, job.model_revision, online=online)
    return make_plan(job, model, settings, planned_gpus(settings), lengths)


def _check_same_kind(old: Job, new: Job) -> None:
    """Raises BadRequest if a job that trains would only evaluate, or the other way round, and if a
    job would evaluate other models, which have not been checked."""
    if old.trains != new.trains:
        kept = "steps from 1 on" if old.trains else "steps = 0"
        raise BadRequest(
            f"steps: got {new.steps}, but the job began with {old.steps}; expected {kept}"
        )
    if old.evaluation.models != new.evaluation.models:
        raise BadRequest(
            "evaluation.models: got other models than the job began with; submit another job"
        )


def metadata_of(request: Request) -> dict[str, str] | None:
    """Returns the names and values of `metadata[name]=value`, which may come several times; None
    for `metadata=null`."""
    text = request.query_params.get("metadata")
    if text not in (None, "null"):
        raise BadRequest(f"'metadata': got {text!r}; expected metadata[name]=value, or null")
    if text:
        return None
    return {
        name.removeprefix("metadata[").removesuffix("]"): value
        for name, value in request.query_params.items()
        if name.startswith("metadata[")
    }
