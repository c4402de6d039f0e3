"""The jobs API. Parses, asks the store and the run folder, answers; the worker does the work."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response, StreamingResponse

from services.orchestrator.api.regrade import regrade
from services.orchestrator.loop.peers import Peers
from services.orchestrator.loop.prompts import Prompts, load_prompts
from services.orchestrator.loop.tasks import stop
from services.orchestrator.queue.store import Store
from services.orchestrator.queue.worker import Worker
from services.orchestrator.record.folder import RunFolder
from services.orchestrator.record.graded import graded
from shared import codec
from shared.config import Settings
from shared.errors import BadRequest, Failed, Unavailable
from shared.job import Job
from shared.models import model_folder
from shared.service import Service, request_key
from shared.wire import (
    TERMINAL,
    Checkpoint,
    CheckpointList,
    EventList,
    JobList,
    JobRecord,
    MetricsList,
    RegradeReport,
    RegradeRequest,
    RolloutList,
    SubmitRequest,
)

SSE_WAIT_S = 15.0
EVENT_ID = r"^\d+(-\d+)?$"


def create_service(settings: Settings, store: Store) -> Service:
    """Returns the orchestrator, its worker running inside."""

    @contextlib.asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        worker = asyncio.create_task(Worker(store, settings).run_forever())
        worker.add_done_callback(_stopped)
        try:
            yield
        finally:
            await stop(worker)
            await store.close()

    async def check_redis() -> str | None:
        try:
            await store.ping()
        except Unavailable as error:
            return error.detail
        return None

    service = Service("orchestrator", settings, readiness={"redis": check_redis}, lifespan=lifespan)
    _add_job_routes(service, settings, store)
    _add_history_routes(service.app, store)
    _add_regrade_route(service, settings, store)
    return service


def _stopped(worker: asyncio.Task[None]) -> None:
    """A worker that ends by a bug takes the process with it: an orchestrator that accepts jobs and
    runs none is worse."""
    if not worker.cancelled() and (error := worker.exception()):
        raise SystemExit(f"the worker stopped: {error!r}") from error


def _add_job_routes(service: Service, settings: Settings, store: Store) -> None:
    async def submit(request: SubmitRequest) -> JobRecord:
        """Accepts a job once its data, rewards and model have been checked. Accepted, it is on
        disk."""
        await check_job(request.job, settings)
        job_id = f"{request.job.name}-{secrets.token_hex(3)}"
        run_dir = (settings.runs_dir / job_id).resolve()
        return await store.submit(job_id, request.job, run_dir, request_key.get())

    service.operation("POST", "/v1/jobs", submit)
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

    @app.post("/v1/jobs/{job_id}/cancel")
    async def cancel_job(job_id: str) -> JobRecord:
        """Cancels a queued or paused job now, a running one within seconds."""
        return await store.cancel(job_id)

    @app.post("/v1/jobs/{job_id}/pause")
    async def pause_job(job_id: str) -> JobRecord:
        """Pauses a queued job now, a running one within seconds. The worker is then free for the
        next job."""
        return await store.pause(job_id)

    @app.post("/v1/jobs/{job_id}/resume")
    async def resume_job(job_id: str) -> JobRecord:
        """Queues a paused job again. It goes on where it was."""
        return await store.resume(job_id)


def _add_history_routes(app: FastAPI, store: Store) -> None:
    async def folder(job_id: str) -> RunFolder:
        return RunFolder(Path((await store.get(job_id)).run_dir))

    @app.get("/v1/jobs/{job_id}/events", response_model=None)
    async def events(
        job_id: str, request: Request, after: Annotated[str, Query(pattern=EVENT_ID)] = "0"
    ) -> EventList | Response:
        """What happened: a JSON page, or a stream of server-sent events to the job's end if that is
        accepted. Either goes on after the id given by `after` or Last-Event-ID."""
        await store.get(job_id)
        if "text/event-stream" not in request.headers.get("accept", ""):
            return EventList(events=tuple(await store.events(job_id, after)))
        last = request.headers.get("last-event-id", after)
        if not re.match(EVENT_ID, last):
            raise BadRequest(
                f"Last-Event-ID is {last!r}; expected an event's id such as '1763700000000-0'"
            )
        return StreamingResponse(
            _stream(store, job_id, last),
            media_type="text/event-stream",
            headers={"cache-control": "no-store"},
        )

    @app.get("/v1/jobs/{job_id}/metrics")
    async def metrics(job_id: str, after_step: int = -1) -> MetricsList:
        """A row of metrics a step; row 0 is the evaluation before training."""
        return MetricsList(
            rows=tuple(await asyncio.to_thread((await folder(job_id)).metrics, after_step))
        )

    @app.get("/v1/jobs/{job_id}/rollouts")
    async def rollouts(
        job_id: str, step: int | None = None, limit: Annotated[int, Query(ge=1)] = 10_000
    ) -> RolloutList:
        """The graded rollouts of a step; of the newest one without `step`."""
        record = await store.get(job_id)
        run = RunFolder(Path(record.run_dir))
        number = step if step is not None else max(run.batch_steps(), default=0)
        batch = await asyncio.to_thread(run.batch, number)
        return RolloutList(step=number, rollouts=graded(batch, record.job)[:limit])

    @app.get("/v1/jobs/{job_id}/checkpoints")
    async def checkpoints(job_id: str) -> CheckpointList:
        """The checkpoints there are, oldest first: those written, without those that the trainer
        has since removed."""
        spec = (await store.get(job_id)).job.checkpoints
        events = [
            event
            for event in await store.events(job_id, "0", count=100_000)
            if event.type == "checkpoint"
        ]
        found = {event.data["step"]: Checkpoint.model_validate(event.data) for event in events}
        newest = sorted(found)[-spec.keep_last :]
        kept = [
            step
            for step in sorted(found)
            if step in newest or (spec.keep_every and step % spec.keep_every == 0)
        ]
        return CheckpointList(checkpoints=tuple(found[step] for step in kept))


def _add_regrade_route(service: Service, settings: Settings, store: Store) -> None:
    @service.app.post("/v1/jobs/{job_id}/regrade", response_model=RegradeReport)
    async def regrade_job(job_id: str, body: RegradeRequest, request: Request) -> Response:
        """Grades stored rollouts by other rewards and says what would flip. Nothing is written to
        the run."""
        record = await store.get(job_id)
        folder = RunFolder(Path(record.run_dir))
        key = request.headers.get("idempotency-key")
        operation = service.operations.start(
            lambda: regrade(body, record.job, folder, settings),
            f"regrade {job_id} {key}" if key else None,
            body.model_dump_json(),
            f"regrading {job_id}",
        )
        return await service.answer(operation, request)


async def check_job(job: Job, settings: Settings) -> None:
    """Raises a sentence for what would fail the job later, or let it learn nothing: data that
    cannot be read, a model folder that is none, groups of one, rewards that the reward service does
    not know or that need columns the data lacks."""
    if job.sampling.group_size == 1:
        raise BadRequest(
            "sampling.group_size is 1: a lone completion has nothing to be compared with; expected "
            "2 or more"
        )
    model_folder(job.model)
    prompts = await asyncio.to_thread(load_prompts, job)
    await asyncio.to_thread(_check_prompts, prompts)
    peers = Peers(job, settings)
    try:
        await peers.validate_rewards(prompts.columns)
    except Failed as error:
        raise Unavailable(error.detail) from error
    finally:
        await peers.close()


def _check_prompts(prompts: Prompts) -> None:
    """Makes the first step's and all held-out prompts, and tries whether they can be sent."""
    for prompt in (*prompts.for_step(1), *prompts.held_out()):
        codec.encode(prompt, codec.MSGPACK)


async def _stream(store: Store, job_id: str, last: str) -> AsyncGenerator[str]:
    """Yields each event as server-sent text, a comment while nothing happens, and `end` after the
    job's last event."""
    while True:
        ended = (await store.get(job_id)).status in TERMINAL
        found = await store.events(job_id, last, block_s=None if ended else SSE_WAIT_S)
        for event in found:
            last = event.id
            yield f"id: {event.id}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n"
        if ended and not found:
            yield "event: end\ndata: {}\n\n"
            return
        if not found:
            yield ": waiting\n\n"
