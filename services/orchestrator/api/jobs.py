"""Submitting jobs, and the checks before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pydantic import ValidationError

from services.orchestrator.api.checking import Checks
from services.orchestrator.api.looking import Looked
from services.orchestrator.data.allowed import named_model_folder
from services.orchestrator.grpo.prompts import with_steps
from services.orchestrator.jobs.needs import check_colocation
from services.orchestrator.jobs.stopping import price_for
from services.orchestrator.samplers.abilities import on_cpu
from services.orchestrator.samplers.services import Services
from services.orchestrator.seams import Extensions, Unreachable
from services.orchestrator.store.records import Submission
from services.orchestrator.store.run_folders import accept, accepted, stop
from services.orchestrator.store.store import Store
from services.orchestrator.store.writable import Writable
from shared.errors import BadRequest, Failed, Unavailable
from shared.explain import sentences
from shared.http.gate import scoped
from shared.http.rendering import Made
from shared.http.service import Service, request_key
from shared.job import Job
from shared.job.checks import check_groups
from shared.plan.gpus import GpuGroup
from shared.plan.model import CannotPlan, find_model
from shared.plan.planning import Known, make_plan
from shared.settings import Settings
from shared.wire import (
    CreateFineTuningJob,
    DryRun,
    JobRecord,
    Plan,
    Prompt,
    SubmitRequest,
    Withdrawn,
    WithdrawRequest,
)


def add_routes(
    service: Service, settings: Settings, store: Store, runs: Writable, checks: Checks
) -> None:
    async def submit(request: SubmitRequest) -> Made[JobRecord]:
        """Accepts a job once its data, rewards and model have been checked: 201, and it is on disk.
        If its Idempotency-Key was used for this job before: 200, and the job as it is now."""
        key = request_key.get()
        if known := await accepted(store, request.job, key):
            return Made[JobRecord](body=known, location=f"/v1/jobs/{known.id}", is_new=False)
        await runs.check()
        looked = await check_job(request.job, settings, checks)
        submission = Submission(
            with_steps(request.job, looked.num_train),
            settings.runs_dir,
            key,
            looked.versions,
            asked=request.job,
            warnings=looked.warnings,
        )
        record = await accept(store, submission)
        is_new = record.id == submission.id
        return Made[JobRecord](body=record, location=f"/v1/jobs/{record.id}", is_new=is_new)

    async def withdraw(request: WithdrawRequest) -> Withdrawn:
        """Withdraws the submission with an Idempotency-Key. A submission that is under way or has
        yet to arrive is refused (409); a job that was accepted already is cancelled."""
        job_id = await store.withdraw(scoped(request.key))
        return Withdrawn(job=await stop(store, job_id) if job_id else None)

    async def dry_run(request: SubmitRequest) -> DryRun:
        """Checks a job as a submission does, and shows its first prompts. Nothing is submitted."""
        looked = await check_job(request.job, settings, checks, showing=True)
        job, online = with_steps(request.job, looked.num_train), not checks.hub_is_away
        pools = await checks.planned_gpus()
        plan_of = partial(_planned, settings=settings, pools=pools, online=online)
        tried = await asyncio.to_thread(_dry_run, job, looked, plan_of)
        return tried.model_copy(
            update={"trial": await _trial(job, looked.first, settings, checks.extensions)}
        )

    async def plan(request: SubmitRequest) -> Plan:
        """Says what a job will probably need and cost on HONE_GPUS, or else on this machine's GPUs.
        Only the job's model is looked at, and how long prompts of its data are; what else is wrong
        with the data is not refused."""
        await asyncio.to_thread(named_model_folder, request.job.model, settings)
        known = Known(lengths=await checks.lengths(request.job))
        try:
            pools, online = await checks.planned_gpus(), not checks.hub_is_away
            return await asyncio.to_thread(
                _planned, request.job, known, settings, pools, online=online
            )
        except CannotPlan as error:
            raise BadRequest(str(error)) from error

    service.operation("POST", "/v1/jobs", submit, durable=True)
    service.operation(
        "POST", "/v1/jobs/withdraw", withdraw, key=lambda request: request.key, durable=True
    )
    service.operation("POST", "/v1/jobs/dry_run", dry_run)
    service.operation("POST", "/v1/jobs/plan", plan)


async def check_job(
    job: Job, settings: Settings, checks: Checks, *, showing: bool = False
) -> Looked:
    """Returns the findings about the job. Raises HoneError for faults that would fail the job
    later, or let it learn nothing: data that cannot be read, a wrong model folder, groups of one,
    rewards that the reward service does not know or that need columns the data lacks."""
    check_groups(job)
    if job.request:
        _check_request(job)
    check_colocation(job, settings)
    price_for(job, settings)
    looked = await checks.look(job, showing=showing)
    services = Services(job, settings.per_trainer[0], extensions=checks.extensions)
    try:
        await services.validate_rewards(looked.columns, looked.first)
        await services.validate_environment(looked.first)
        if not looked.cpu_limit:
            return looked
        said = await on_cpu(job, looked.cpu_limit, settings.per_trainer[0])
        return replace(looked, warnings=(*looked.warnings, *said))
    except Unreachable as error:
        raise BadRequest(error.detail) from error
    except Failed as error:
        raise Unavailable(error.detail) from error
    finally:
        await services.close()


async def _trial(
    job: Job, first: tuple[Prompt, ...], settings: Settings, extensions: Extensions
) -> tuple[str, ...]:
    services = Services(job, settings.per_trainer[0], extensions=extensions)
    try:
        found = await services.try_rewards(first)
    finally:
        await services.close()
    return (found.summary, *found.warnings) if found else ()


def _check_request(job: Job) -> None:
    """Raises BadRequest for a request of OpenAI's API that this API could not show again."""
    try:
        CreateFineTuningJob.model_validate(job.request)
    except ValidationError as error:
        faults = sentences(error, CreateFineTuningJob, "'job.request'")
        raise BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults) from error


def _dry_run(job: Job, looked: Looked, plan_of: Callable[[Job, Known], Plan]) -> DryRun:
    planned, not_planned = None, ""
    known = Known(lengths=looked.lengths)
    try:
        planned = plan_of(job, known)
    except CannotPlan as error:
        not_planned = str(error)
    return DryRun(
        job=job,
        columns=looked.columns,
        num_train=looked.num_train,
        num_held_out=looked.num_held_out,
        data=looked.versions,
        prompts=looked.shown,
        not_counted=looked.not_counted,
        plan=planned,
        not_planned=not_planned,
        warnings=looked.warnings,
    )


def _planned(
    job: Job, known: Known, settings: Settings, pools: tuple[GpuGroup, ...], *, online: bool
) -> Plan:
    model = find_model(job.model, job.model_revision, online=online)
    return make_plan(job, model, settings, pools, known)
