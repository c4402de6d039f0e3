"""Submitting jobs, and what is checked before."""

from __future__ import annotations

import asyncio

from pydantic import ValidationError

from services.orchestrator.api.checking import CHECKING
from services.orchestrator.api.rows import check_rows
from services.orchestrator.data.allowed import named_model_folder
from services.orchestrator.data.preview import preview
from services.orchestrator.loop.colocation import check_colocation
from services.orchestrator.loop.costs import price_for
from services.orchestrator.loop.peers import Peers
from services.orchestrator.loop.prompts import Prompts, load_prompts, with_steps
from services.orchestrator.queue.ids import new_job_id
from services.orchestrator.queue.store import Store
from shared.config import Settings
from shared.errors import BadRequest, Failed, Unavailable
from shared.explain import sentences
from shared.job import Job
from shared.model_check import check_model_folder, check_rope, read_config
from shared.plan.model import CannotPlan, find_model
from shared.plan.planning import Known, make_plan, planned_gpus
from shared.rendering import Made
from shared.service import Service, request_key
from shared.wire import CreateFineTuningJob, DryRun, JobRecord, Plan, Prompt, SubmitRequest


def add_routes(service: Service, settings: Settings, store: Store) -> None:
    async def submit(request: SubmitRequest) -> Made[JobRecord]:
        """Accepts a job once its data, rewards and model have been checked: 201, and it is on disk.
        With an Idempotency-Key that was used for it before: 200, and the job as it is now."""
        if known := await store.submitted(request.job, request_key.get()):
            return Made[JobRecord](body=known, location=f"/v1/jobs/{known.id}", is_new=False)
        prompts = await check_job(request.job, settings)
        job, job_id = with_steps(request.job, prompts), new_job_id(request.job.name)
        record = await store.submit(
            job, settings.runs_dir, request_key.get(), prompts.versions, job_id, request.job
        )
        is_new = record.id == job_id
        return Made[JobRecord](body=record, location=f"/v1/jobs/{record.id}", is_new=is_new)

    async def dry_run(request: SubmitRequest) -> DryRun:
        """Checks a job as a submission does, and shows its first prompts. Nothing is submitted."""
        prompts = await check_job(request.job, settings)
        job = with_steps(request.job, prompts)
        first = await asyncio.to_thread(prompts.for_step, 1)
        tried = await asyncio.to_thread(_dry_run, job, prompts, first, settings)
        return tried.model_copy(update={"trial": await _trial(job, first, settings)})

    async def plan(request: SubmitRequest) -> Plan:
        """Says what a job will probably need and cost on HONE_GPUS, or else on this machine's
        GPUs. Nothing of the job but its model is looked at."""
        await asyncio.to_thread(named_model_folder, request.job.model, settings)
        try:
            return await asyncio.to_thread(_planned, request.job, settings)
        except CannotPlan as error:
            raise BadRequest(str(error)) from error

    service.operation("POST", "/v1/jobs", submit, durable=True)
    service.operation("POST", "/v1/jobs/dry_run", dry_run)
    service.operation("POST", "/v1/jobs/plan", plan)


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
    price_for(job, settings)
    prompts, first = await CHECKING.run(lambda: _checked_data(job, settings))
    peers = Peers(job, settings.slots[0])
    try:
        await peers.validate_rewards(prompts.columns, first)
        return prompts
    except Failed as error:
        raise Unavailable(error.detail) from error
    finally:
        await peers.close()


async def _trial(job: Job, first: tuple[Prompt, ...], settings: Settings) -> tuple[str, ...]:
    peers = Peers(job, settings.slots[0])
    try:
        found = await peers.try_rewards(first)
    finally:
        await peers.close()
    return (found.summary, *found.warnings) if found else ()


def _checked_data(job: Job, settings: Settings) -> tuple[Prompts, tuple[Prompt, ...]]:
    if folder := named_model_folder(job.model, settings):
        check_model_folder(folder, job.max_model_len)
        check_rope(job.model, read_config(folder), job.max_model_len)
    prompts = load_prompts(job, settings)
    return prompts, check_rows(job, prompts)


def _check_request(job: Job) -> None:
    """Raises BadRequest for a request of OpenAI's API that this API could not show again."""
    try:
        CreateFineTuningJob.model_validate(job.request)
    except ValidationError as error:
        faults = sentences(error, CreateFineTuningJob, "'job.request'")
        raise BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults) from error


def _dry_run(job: Job, prompts: Prompts, first: tuple[Prompt, ...], settings: Settings) -> DryRun:
    shown, why = preview(job, first)
    lengths = [prompt.num_tokens for prompt in shown if prompt.num_tokens is not None]
    planned, not_planned = None, ""
    try:
        planned = _planned(job, settings, Known(max(lengths, default=None), is_longest=False))
    except CannotPlan as error:
        not_planned = str(error)
    return DryRun(
        job=job,
        columns=prompts.columns,
        num_train=prompts.num_train,
        num_held_out=prompts.num_held_out,
        data=prompts.versions,
        prompts=shown,
        not_counted=why,
        plan=planned,
        not_planned=not_planned,
    )


def _planned(job: Job, settings: Settings, known: Known | None = None) -> Plan:
    model = find_model(job.model, job.model_revision)
    return make_plan(job, model, settings, planned_gpus(settings), known)
