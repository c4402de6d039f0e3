"""A job's history: its events, metrics, rollouts and checkpoints, and what is wrong with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Annotated

from fastapi import Path as Path_
from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse

from services.orchestrator.api.details import MAX_DETAILED, detailed
from services.orchestrator.grpo.advantages import batch_advantages
from services.orchestrator.grpo.examples import of_all_tokens
from services.orchestrator.store.checkpoint_files import files_of, path_of
from services.orchestrator.store.connection import MAX_FOLLOWERS
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.reading import Readable
from services.orchestrator.store.records import check_event_id
from shared.errors import Busy, NotFound
from shared.http import rendering
from shared.http.operations import DOWNLOADED, DownloadedFile
from shared.http.service import Service
from shared.job import Job
from shared.wire import (
    TERMINAL,
    Batch,
    Checkpoint,
    CheckpointFiles,
    CheckpointList,
    EventList,
    GradedRollout,
    JobProgress,
    MetricsList,
    RolloutList,
)
from shared.wire.pages import MAX_EVENTS, MAX_LAST, MAX_ROWS

EVENT_STREAM = "text/event-stream"

SSE_WAIT_S = 15.0
"""Seconds without an event after which a follower gets a comment, so that proxies do not close the
connection."""

PROGRESS_S = 2.0
"""Seconds without an event after which a follower with `progress` is told what the job does."""

MAX_STEP = 10**9

Step = Annotated[int, Query(ge=0, le=MAX_STEP)]
SetName = Annotated[str, Query(pattern=r"^([a-z0-9][a-z0-9_-]*)?$", max_length=40)]
StepInPath = Annotated[int, Path_(ge=0, le=MAX_STEP)]


def add_routes(service: Service, store: Readable) -> None:
    _add_events(service, store)
    _add_results(service, store)
    _add_rollouts(service, store)
    _add_checkpoints(service, store)


def _add_events(service: Service, store: Readable) -> None:
    followers = Followers(store)
    either: rendering.Responses = {
        200: {
            "content": rendering.without_model("", EVENT_STREAM, schema=rendering.TEXT)["content"]
        }
    }

    @service.app.get("/v1/jobs/{job_id}/events", response_model=EventList, responses=either)
    async def events(
        job_id: str,
        request: Request,
        after: str = "0",
        limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = MAX_EVENTS,
        last: Annotated[int | None, Query(ge=1, le=MAX_LAST)] = None,
        progress: bool = False,
        until_paused: bool = False,
    ) -> EventList | Response:
        """A job's events: a JSON page, or, if accepted, a stream of server-sent events to the job's
        end, with `until_paused` also to a pause. Both begin after the id in `after` or
        Last-Event-ID; with `last` the page has that many of the newest events instead. With
        `progress`, the stream says every two seconds without an event what the job does (type
        `progress`, without an id)."""
        await store.get(job_id)
        if EVENT_STREAM not in request.headers.get("accept", ""):
            if last is not None:
                newest = await store.newest_events(job_id, None, last)
                return EventList(events=tuple(reversed(newest)))
            found = await store.events(job_id, after, count=limit + 1)
            more = len(found) > limit
            page = tuple(found[:limit])
            return EventList(events=page, next_after=page[-1].id if more else None)
        seen = request.headers.get("last-event-id", after)
        check_event_id(seen, "Last-Event-ID")
        followers.check_room()
        return StreamingResponse(
            followers.follow(job_id, seen, progress=progress, until_paused=until_paused),
            media_type=EVENT_STREAM,
            headers={"cache-control": "no-store"},
        )


def _add_results(service: Service, store: Readable) -> None:
    @service.app.get("/v1/jobs/{job_id}/metrics")
    async def metrics(
        job_id: str,
        after_step: Annotated[int, Query(ge=-1, le=MAX_STEP)] = -1,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = MAX_ROWS,
    ) -> MetricsList:
        """A row of metrics per step; row 0 is the evaluation before training."""
        run = RunFolder(Path((await store.get(job_id)).run_dir))
        found = await asyncio.to_thread(run.metrics, after_step)
        rows = tuple(found[:limit])
        more = len(found) > limit
        return MetricsList(rows=rows, next_after_step=rows[-1].step if more else None)


def _add_rollouts(service: Service, store: Readable) -> None:
    app = service.app

    @app.get("/v1/jobs/{job_id}/rollouts")
    async def rollouts(
        job_id: str,
        step: Step | None = None,
        after: Annotated[int, Query(ge=0, le=MAX_STEP)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = MAX_ROWS,
        detail: bool = False,
    ) -> RolloutList:
        """The graded rollouts of a step, `[P*G]` without the first `after`. Without `step`, of the
        newest step. With `detail` each has its messages and tokens, and at most 100 are
        returned."""
        record = await store.get(job_id)
        run = RunFolder(Path(record.run_dir))
        number = step if step is not None else max(run.batch_steps(), default=0)
        end = after + (min(limit, MAX_DETAILED) if detail else limit)

        def read() -> tuple[Sequence[GradedRollout], int]:
            batch = run.batch(number)
            found = graded(batch, record.job)
            page = found[after:end]
            if detail:
                page = detailed(page, batch, after, record.job, run.trained(number))
            return page, len(found)

        page, total = await asyncio.to_thread(read)
        return RolloutList(
            step=number, rollouts=tuple(page), next_after=end if end < total else None
        )

    @app.get("/v1/jobs/{job_id}/held_out")
    async def held_out(
        job_id: str,
        step: Step | None = None,
        name: SetName = "",
        after: Annotated[int, Query(ge=0, le=MAX_STEP)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = MAX_ROWS,
    ) -> RolloutList:
        """Completions of the evaluation after `step`, with their rewards, without the first
        `after`: two of each of the first 64 problems of `data.eval`, or of the held-out set `name`,
        with at most 20,000 characters of each prompt and completion. Without `step`, of the newest
        evaluation; step 0 is the model before training. In a job of 0 steps, `step` is the number
        of a model in its report, from 0."""
        run = RunFolder(Path((await store.get(job_id)).run_dir))
        found = await asyncio.to_thread(run.held_out, name, step)
        end = after + limit
        page, more = found.rollouts[after:end], end < len(found.rollouts)
        return found.model_copy(update={"rollouts": page, "next_after": end if more else None})


def _add_checkpoints(service: Service, store: Readable) -> None:
    @service.app.get("/v1/jobs/{job_id}/checkpoints")
    async def checkpoints(job_id: str) -> CheckpointList:
        """The job's checkpoints that are on disk, oldest first."""
        return CheckpointList(checkpoints=tuple((await kept(job_id)).values()))

    async def kept(job_id: str) -> dict[int, Checkpoint]:
        await store.get(job_id)
        found = await still_there(await store.checkpoints(job_id))
        return {checkpoint.step: checkpoint for checkpoint in found}

    async def folder(job_id: str, step: int) -> Path:
        """Returns the folder of the checkpoint of `step`. Raises NotFound."""
        found = await kept(job_id)
        if step in found:
            return Path(found[step].path)
        have = f"has checkpoints of steps {', '.join(map(str, found))}" if found else "has none"
        raise NotFound(f"job {job_id!r} has no checkpoint of step {step}; it {have}")

    @service.app.get("/v1/jobs/{job_id}/checkpoints/{step}")
    async def checkpoint_files(job_id: str, step: StepInPath) -> CheckpointFiles:
        """The files of a checkpoint, each with its size and checksum."""
        path = await folder(job_id, step)
        files = await asyncio.to_thread(files_of, path)
        return CheckpointFiles(step=step, files=files)

    @service.app.get(
        "/v1/jobs/{job_id}/checkpoints/{step}/files/{name:path}",
        response_class=DownloadedFile,
        responses=DOWNLOADED,
    )
    async def checkpoint_file(job_id: str, step: StepInPath, name: str) -> DownloadedFile:
        """The bytes of a file of a checkpoint. Takes `Range`, so an interrupted download can
        resume."""
        path = await asyncio.to_thread(path_of, await folder(job_id, step), name)
        return DownloadedFile(path, path.name)


async def still_there(found: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Returns the checkpoints of `found` that are on disk."""
    return await asyncio.to_thread(lambda: [each for each in found if Path(each.path).is_dir()])


class Followers:
    """The open streams of server-sent events. Each holds a connection to Redis while it waits, so
    their number is bounded."""

    def __init__(self, store: Readable) -> None:
        self._store = store
        self._num_open = 0

    def check_room(self) -> None:
        """Raises Busy if one more would be too many."""
        if self._num_open >= MAX_FOLLOWERS:
            raise Busy(
                f"{self._num_open} clients follow events already, and at most {MAX_FOLLOWERS} can; "
                "ask for a page of events instead"
            )

    async def follow(
        self, job_id: str, last: str, *, progress: bool = False, until_paused: bool = False
    ) -> AsyncGenerator[str]:
        """Yields each event after `last` as server-sent text. While nothing happens yields a
        comment, or with `progress` what the job does. Yields `end` after the last event of an ended
        or, with `until_paused`, a paused job."""
        ends = (None, *TERMINAL, *(["paused"] if until_paused else []))
        self._num_open += 1
        pause_s = PROGRESS_S if progress else SSE_WAIT_S
        try:
            while True:
                ended = (await self._store.status(job_id)) in ends
                wait_s = None if ended else pause_s
                found = await self._store.events(job_id, last, block_s=wait_s)
                for event in found:
                    last = event.id
                    yield _sse(event.id, event.type, event.model_dump_json())
                if ended and not found:
                    yield _sse("", "end", "{}")
                    return
                if not found:
                    doing = await self._store.doing(job_id) if progress else None
                    told = JobProgress(message=doing, time=time.time()) if doing else None
                    yield _sse("", "progress", told.model_dump_json()) if told else ": waiting\n\n"
        finally:
            self._num_open -= 1


def _sse(id: str, type: str, data: str) -> str:
    return (f"id: {id}\n" if id else "") + f"event: {type}\ndata: {data}\n\n"


def graded(batch: Batch, job: Job) -> tuple[GradedRollout, ...]:
    """Returns the batch's `[P*G]` rollouts with their verdicts and advantages."""
    advantages_PG = batch_advantages(batch, job)
    return tuple(
        GradedRollout(
            prompt_index=prompt.index,
            prompt=prompt.content,
            completion=rollout.text,
            finish_reason=rollout.finish_reason,
            versions=rollout.versions,
            reward=score.value,
            parts=score.parts,
            advantage=of_all_tokens(advantage),
            turn_advantages=advantage if isinstance(advantage, tuple) else (),
            forked=tuple(branch.because for branch in rollout.branches),
        )
        for prompt, group, scores, advantages in zip(
            batch.prompts, batch.groups, batch.scores, advantages_PG, strict=True
        )
        for rollout, score, advantage in zip(group.rollouts, scores, advantages, strict=True)
    )
