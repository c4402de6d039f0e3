"""`/v1/fine_tuning/jobs`: jobs of the jobs API, submitted and shown in OpenAI's shape; and
`/v1/fine_tuning/alpha/graders`: the reward service's graders, under OpenAI's path."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from fastapi import FastAPI, Query, Request

from services.orchestrator.api.history import existing_checkpoints
from services.orchestrator.api.jobs import METADATA, metadata_of
from services.orchestrator.jobs.preflight import Preflight, Submissions
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.lists import JobFilter
from services.orchestrator.store.records import UnreadableRecord, check_event_id
from services.orchestrator.store.run_folders import cancel
from services.orchestrator.store.store import Store
from shared.errors import BadRequest, NotFound
from shared.http.client import Client
from shared.http.service import Service, request_key
from shared.job import LORA_LEARNING_RATE, SFT_FACTOR, UPLOADED, Job, SamplingSpec, name_of
from shared.job.file import parse_job
from shared.settings import Settings
from shared.wire import (
    Checkpoint,
    CreateFineTuningJob,
    Event,
    FineTuningCheckpoint,
    FineTuningCheckpointList,
    FineTuningError,
    FineTuningEvent,
    FineTuningEventList,
    FineTuningJob,
    FineTuningJobList,
    GraderRun,
    GraderRunRequest,
    JobRecord,
    Reinforcement,
    Validated,
    ValidatedGrader,
    ValidateGraderRequest,
    ValidateRequest,
)
from shared.wire.openai import PREFIX
from shared.wire.rewards import reward_of

ROOT = "/v1/fine_tuning/jobs"
GRADERS = "/v1/fine_tuning/alpha/graders"

RUN_DEADLINE_S = 600.0
VALIDATE_DEADLINE_S = 60.0

Limit = Annotated[int, Query(ge=1, le=1000)]


def add_routes(
    service: Service, settings: Settings, store: Store, submissions: Submissions
) -> None:
    jobs, app = FineTuningJobs(store, submissions), service.app
    _add_history_routes(app, jobs, store)
    add_grader_routes(service, settings)
    service.operation("POST", ROOT, jobs.create, durable=True)

    @app.get(ROOT, openapi_extra=METADATA)
    async def list_fine_tuning_jobs(
        request: Request,
        after: str | None = None,
        limit: Limit = 20,
        metadata: Annotated[str | None, Query(include_in_schema=False)] = None,
    ) -> FineTuningJobList:
        """Jobs submitted here, newest first. `metadata[name]=value` lists only jobs with that
        entry; `metadata=null`, only jobs without metadata."""
        wanted = JobFilter(metadata=metadata_of(request), openai=True)
        found, has_more = await jobs.listed(after, limit, wanted)
        return FineTuningJobList(data=tuple(found), has_more=has_more)

    @app.get(ROOT + "/{job_id}")
    async def get_fine_tuning_job(job_id: str) -> FineTuningJob:
        """One job."""
        return await jobs.shown(await jobs.record(job_id))

    @app.post(ROOT + "/{job_id}/cancel")
    async def cancel_fine_tuning_job(job_id: str) -> FineTuningJob:
        """Cancels a job; a running one within seconds."""
        return await jobs.changed(job_id, functools.partial(cancel, store))

    @app.post(ROOT + "/{job_id}/pause")
    async def pause_fine_tuning_job(job_id: str) -> FineTuningJob:
        """Pauses a job; a running one within seconds."""
        return await jobs.changed(job_id, store.pause)

    @app.post(ROOT + "/{job_id}/resume")
    async def resume_fine_tuning_job(job_id: str) -> FineTuningJob:
        """Queues a paused job again."""
        return await jobs.changed(job_id, store.resume)


def _add_history_routes(app: FastAPI, jobs: FineTuningJobs, store: Store) -> None:
    @app.get(ROOT + "/{job_id}/events")
    async def list_fine_tuning_events(
        job_id: str, after: str | None = None, limit: Limit = 20
    ) -> FineTuningEventList:
        """The job's events, newest first."""
        await jobs.record(job_id)
        before = None if after is None else after.removeprefix(PREFIX)
        if before is not None:
            check_event_id(before, "after")
        found = await store.newest_events(job_id, before, limit + 1)
        shown = tuple(map(fine_tuning_event, found[:limit]))
        return FineTuningEventList(data=shown, has_more=len(found) > limit)

    @app.get(ROOT + "/{job_id}/checkpoints")
    async def list_fine_tuning_checkpoints(
        job_id: str, after: str | None = None, limit: Limit = 10
    ) -> FineTuningCheckpointList:
        """The job's checkpoints on disk, newest first. `after` may also be a removed checkpoint."""
        record = await jobs.record(job_id)
        rows = await asyncio.to_thread(RunFolder(Path(record.run_dir)).metrics)
        ever = await store.checkpoints(job_id)
        before = None if after is None else _step_of(after, job_id, ever)
        kept = [
            checkpoint
            for checkpoint in (await existing_checkpoints(ever))[::-1]
            if before is None or checkpoint.step < before
        ]
        metrics = {row.step: row.metrics for row in rows}
        shown = [
            fine_tuning_checkpoint(
                record, checkpoint, metrics.get(checkpoint.step, {}), _written_at(checkpoint.path)
            )
            for checkpoint in kept[:limit]
        ]
        return FineTuningCheckpointList(
            data=tuple(shown),
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
            has_more=len(kept) > limit,
        )


def add_grader_routes(service: Service, settings: Settings) -> None:
    def reward_service() -> Client:
        return Client(
            "reward",
            settings.reward_url,
            token=settings.bearer(),
            patience_s=settings.patience_s,
        )

    async def run(request: GraderRunRequest) -> GraderRun:
        """Grades one completion by one grader."""
        async with reward_service() as reward:
            return await reward.call(
                "POST", "/graders/run", request, GraderRun, deadline_s=RUN_DEADLINE_S
            )

    async def validate(request: ValidateGraderRequest) -> ValidatedGrader:
        """Checks whether a job could use this grader; 422 with the reasons if not."""
        spec = reward_of(request.grader)
        async with reward_service() as reward:
            await reward.call(
                "POST",
                "/graders/validate",
                ValidateRequest(rewards=(spec,)),
                Validated,
                deadline_s=VALIDATE_DEADLINE_S,
            )
        return ValidatedGrader(grader=request.grader)

    service.operation("POST", GRADERS + "/run", run)
    service.operation("POST", GRADERS + "/validate", validate)


class FineTuningJobs:
    """The jobs that were submitted in OpenAI's shape."""

    def __init__(self, store: Store, submissions: Submissions) -> None:
        self._store, self._submissions = store, submissions

    async def create(self, request: CreateFineTuningJob) -> FineTuningJob:
        """Accepts a job once its data, grader and model have been checked. Accepted, it is on
        disk."""
        document = job_document(request)
        job = parse_job(document, "the job asked for")
        if not job.trains:
            raise BadRequest("'hone.steps' is 0, which trains nothing; expected steps from 1 on")

        def complete(checked: Preflight) -> Job:
            if "steps" in request.hone:
                return job
            if checked.data.num_train is None:
                raise BadRequest(
                    "'hone.steps' is missing; expected a number of steps, because the number of "
                    "rows of a stream is not known"
                )
            count = num_steps(request, checked.data.num_train, job.sampling.prompts_per_step)
            return parse_job(document | {"steps": count}, "the job asked for")

        record, _ = await self._submissions.submit(job, request_key.get(), complete)
        return await self.shown(record)

    async def record(self, job_id: str) -> JobRecord:
        """Raises NotFound for a job that was not submitted in OpenAI's shape."""
        record = await self._store.get(job_id)
        if not record.job.request:
            raise NotFound(f"job {job_id!r} was not submitted here; GET /v1/jobs/{job_id} shows it")
        return record

    async def changed(
        self, job_id: str, change: Callable[[str], Awaitable[object]]
    ) -> FineTuningJob:
        """Returns the job after the change. Raises NotFound as `record` does."""
        await self.record(job_id)
        await change(job_id)
        return await self.shown(await self.record(job_id))

    async def listed(
        self, after: str | None, limit: int, wanted: JobFilter
    ) -> tuple[list[FineTuningJob], bool]:
        """Returns up to `limit` readable jobs, and whether there are more. If there are more, the
        page is full, because clients take an empty page for the end."""
        found: list[FineTuningJob] = []
        while True:
            page = await self._store.list(after, limit - len(found), wanted)
            for summary in page.jobs:
                with contextlib.suppress(NotFound, UnreadableRecord):  # NotFound: deleted meanwhile
                    found.append(await self.shown(await self.record(summary.id)))
            after = page.next_after
            if after is None or len(found) == limit:
                return found, after is not None

    async def shown(self, record: JobRecord) -> FineTuningJob:
        tokens = await asyncio.to_thread(_trained_tokens, record)
        return fine_tuning_job(record, time.time(), tokens)


def _step_of(id: str, job_id: str, ever: Sequence[Checkpoint]) -> int:
    """Returns the step of the checkpoint with that id, among all checkpoints that the job ever had.
    Raises BadRequest for an unknown id."""
    for checkpoint in ever:
        if checkpoint_id(job_id, checkpoint) == id:
            return checkpoint.step
    raise BadRequest(f"after is {id!r:.80}; expected the id of a checkpoint of job {job_id!r}")


def _written_at(path: str) -> float:
    """Returns the file's time in Unix seconds; 0 if it no longer exists."""
    try:
        return Path(path).stat().st_mtime
    except OSError:
        return 0.0


def _trained_tokens(record: JobRecord) -> int | None:
    """Returns how many tokens the steps so far have trained on; None while the job runs."""
    if record.finished_at is None:
        return None
    if record.summary and "trained_tokens" in record.summary:
        return record.summary["trained_tokens"]
    rows = RunFolder(Path(record.run_dir)).metrics()
    return int(sum(row.metrics.get("num_tokens", 0.0) for row in rows))


OBJECTIVES = {"reinforcement": "rl", "supervised": "sft", "dpo": "dpo"}
"""The objective of a job, by OpenAI's method."""

PREFERENCES = {
    "prompt": "input",
    "chosen": "preferred_output",
    "rejected": "non_preferred_output",
}
"""The columns of a file of preferences."""


def job_document(request: CreateFineTuningJob) -> dict[str, Any]:
    """Returns the requested job, with one step: the number of steps depends on the data and is set
    later. Raises BadRequest for an invalid file id."""
    if "request" in request.hone:
        raise BadRequest("'hone.request' is set to the request itself, and cannot be set by it")
    _check_file("training_file", request.training_file)
    _check_file("validation_file", request.validation_file)
    method, knobs = request.method, request.method.hyperparameters
    document: dict[str, Any] = {
        "name": name_of(request.suffix or "", "fine-tuning"),
        "model": request.model,
        "steps": 1,
        "seed": request.seed or 0,
        "data": {
            "train": request.training_file,
            "eval": request.validation_file,
            "columns": {"prompt": "messages"},
        },
        "sampling": _given(prompts_per_step=knobs.batch_size),
        "training": {"objective": OBJECTIVES[method.type]},
        "lora": {},
        "metadata": request.metadata or {},
        "request": request.model_dump(mode="json", exclude={"metadata"}),
    }
    if method.reinforcement:
        document = _laid_over(document, _reinforcement(method.reinforcement))
    if method.type == "dpo":
        beta = method.dpo.hyperparameters.beta if method.dpo else "auto"
        preferences = {"data": {"columns": PREFERENCES}, "training": _given(dpo_beta=beta)}
        document = _laid_over(document, preferences)
    if knobs.learning_rate_multiplier != "auto":
        usual = LORA_LEARNING_RATE * (SFT_FACTOR if method.type == "supervised" else 1)
        document["training"]["learning_rate"] = usual * knobs.learning_rate_multiplier
    for integration in request.integrations or ():
        document["wandb"] = integration.wandb.model_dump(mode="json")
    return _laid_over(document, request.hone)


def _reinforcement(method: Reinforcement) -> dict[str, Any]:
    knobs, size = method.hyperparameters, SamplingSpec().group_size
    times = knobs.compute_multiplier
    num = size if isinstance(times, str) else max(round(size * times), 2)
    return {
        "sampling": {"group_size": num},
        "rewards": [reward_of(method.grader).model_dump(exclude_unset=True)],
        "evaluation": _given(every=knobs.eval_interval, samples=knobs.eval_samples),
    }


def num_steps(request: CreateFineTuningJob, num_rows: int, prompts_per_step: int) -> int:
    """Returns how many steps make the requested number of passes over `num_rows` rows."""
    epochs = request.method.hyperparameters.n_epochs
    return math.ceil(num_rows * (1 if epochs == "auto" else epochs) / prompts_per_step)


def fine_tuning_job(record: JobRecord, now: float, trained_tokens: int | None) -> FineTuningJob:
    """Returns the record in OpenAI's shape. The ETA counts from `now` (Unix seconds)."""
    job = record.job
    # written by any version
    request = CreateFineTuningJob.model_validate(job.request, extra="ignore")
    ends_at = now + record.eta_s if record.status == "running" and record.eta_s else None
    return FineTuningJob(
        id=record.id,
        created_at=int(record.created_at),
        finished_at=_whole(record.finished_at),
        estimated_finish=_whole(ends_at),
        model=job.model,
        fine_tuned_model=record.id if record.status == "succeeded" else None,
        status=record.status,
        error=None
        if record.error is None
        else FineTuningError(code=record.status, message=record.error),
        training_file=request.training_file,
        validation_file=request.validation_file,
        method=request.method,
        seed=job.seed,
        trained_tokens=trained_tokens,
        metadata=job.metadata,
        integrations=request.integrations or (),
    )


def fine_tuning_event(event: Event) -> FineTuningEvent:
    return FineTuningEvent(
        id=PREFIX + event.id,
        created_at=int(event.time),
        level="warn" if event.level == "warning" else event.level,
        message=event.message,
        type="metrics" if event.type in ("step", "eval") else "message",
        data=event.data,
    )


def fine_tuning_checkpoint(
    record: JobRecord, checkpoint: Checkpoint, metrics: Mapping[str, float], created_at: float
) -> FineTuningCheckpoint:
    return FineTuningCheckpoint(
        id=checkpoint_id(record.id, checkpoint),
        created_at=int(created_at),
        fine_tuned_model_checkpoint=checkpoint.path,
        fine_tuning_job_id=record.id,
        metrics={"step": float(checkpoint.step), **metrics},
        step_number=checkpoint.step,
    )


def checkpoint_id(job_id: str, checkpoint: Checkpoint) -> str:
    return f"ftckpt-{job_id}-{checkpoint.step}"


def _check_file(field: str, name: str | None) -> None:
    """Raises BadRequest for a misspelt file id, else it would be taken for a dataset on the Hub."""
    if name is not None and name.startswith("file-") and not UPLOADED.fullmatch(name):
        raise BadRequest(
            f"'{field}': got {name!r:.80}; expected the id of an uploaded file, 'file-' and 24 "
            "hexadecimal digits"
        )


def _given(**values: Any) -> dict[str, Any]:
    """Returns the values that are not "auto". Keys that are left out have a job's defaults."""
    return {key: value for key, value in values.items() if value != "auto"}


def _laid_over(document: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document with `changes` merged into it, section by section."""
    changed = dict(document)
    for key, value in changes.items():
        old = changed.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _laid_over(cast(dict[str, Any], old), cast(dict[str, Any], value))
        changed[key] = value
    return changed


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
