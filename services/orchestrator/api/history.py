"""A job's history: its events, metrics, weight syncs and checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import Path as Path_
from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from services.orchestrator.store.connection import MAX_FOLLOWERS
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.lists import Readable
from services.orchestrator.store.records import check_event_id
from services.orchestrator.store.run_folders import files_of, path_of
from shared.errors import Busy, NotFound
from shared.http import rendering
from shared.http.gate import own_jobs_of
from shared.http.operations import DOWNLOADED, DownloadedFile
from shared.http.rendering import render
from shared.http.service import Service
from shared.wire import (
    TERMINAL,
    Checkpoint,
    CheckpointFiles,
    CheckpointList,
    EventList,
    JobProgress,
    MetricsColumns,
    MetricsList,
    MetricsRow,
    Sync,
    SyncList,
)
from shared.wire.pages import MAX_EVENTS, MAX_LAST, MAX_ROWS

DIGITS = 7
"""Significant digits of a value. A chart shows three; a table shows six."""

EVENT_STREAM = "text/event-stream"

SSE_WAIT_S = 15.0
"""Seconds without an event after which a follower gets a comment, so that proxies do not close the
connection."""

PROGRESS_S = 2.0
"""Seconds without an event after which a follower with `progress` receives what the job does."""

MAX_OF_TENANT = MAX_FOLLOWERS // 4
"""Most streams of one API key of access "own", so that no tenant has all."""

MAX_STEP = 10**9

Step = Annotated[int, Query(ge=0, le=MAX_STEP)]
StepInPath = Annotated[int, Path_(ge=0, le=MAX_STEP)]


def add_routes(service: Service, store: Readable) -> None:
    _add_events(service, store)
    _add_results(service, store)
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
            newer = await store.events(job_id, after, count=limit + 1)
            more = len(newer) > limit
            page = tuple(newer[:limit])
            return EventList(events=page, next_after=page[-1].id if more else None)
        seen = request.headers.get("last-event-id", after)
        check_event_id(seen, "Last-Event-ID")
        return HeldStream(
            followers.reserve(),
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
        rows_after = await asyncio.to_thread(run.metrics, after_step)
        rows = tuple(rows_after[:limit])
        more = len(rows_after) > limit
        return MetricsList(rows=rows, next_after_step=rows[-1].step if more else None)

    @service.app.get("/v1/jobs/{job_id}/syncs")
    async def syncs(job_id: str, last: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 100) -> SyncList:
        """How the last versions of the job's weights reached its samplers."""
        run = RunFolder(Path((await store.get(job_id)).run_dir))
        rows = (await asyncio.to_thread(run.syncs))[-last:]
        return SyncList(syncs=tuple(Sync.model_validate(row, extra="ignore") for row in rows))

    @service.app.get(
        "/v1/jobs/{job_id}/metrics/columns", responses=rendering.answers(MetricsColumns)
    )
    async def metrics_columns(
        job_id: str,
        request: Request,
        names: Annotated[str, Query(max_length=10_000)] = "",
        after_step: Annotated[int, Query(ge=-1)] = -1,
        to_step: Step | None = None,
        points: Annotated[int, Query(ge=2, le=MAX_ROWS)] = MAX_ROWS,
    ) -> Response:
        """A job's metrics by column: `names`, separated by commas, a final `*` standing for any
        ending (all metrics, if none are given), at the steps after `after_step`, up to
        `to_step`."""
        run = RunFolder(Path((await store.get(job_id)).run_dir))

        def read() -> MetricsColumns:
            rows = run.metrics(after_step)
            kept = [row for row in rows if to_step is None or row.step <= to_step]
            return columns(kept, [name for name in names.split(",") if name], points)

        return await render(await asyncio.to_thread(read), request)


def _add_checkpoints(service: Service, store: Readable) -> None:
    @service.app.get("/v1/jobs/{job_id}/checkpoints")
    async def checkpoints(job_id: str) -> CheckpointList:
        """The job's checkpoints that are on disk, oldest first."""
        return CheckpointList(checkpoints=tuple((await kept(job_id)).values()))

    async def kept(job_id: str) -> dict[int, Checkpoint]:
        await store.get(job_id)
        existing = await existing_checkpoints(await store.checkpoints(job_id))
        return {checkpoint.step: checkpoint for checkpoint in existing}

    async def folder(job_id: str, step: int) -> Path:
        """Returns the folder of the checkpoint of `step`. Raises NotFound."""
        by_step = await kept(job_id)
        if step in by_step:
            return Path(by_step[step].path)
        have = f"has checkpoints of steps {', '.join(map(str, by_step))}" if by_step else "has none"
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


async def existing_checkpoints(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Returns the checkpoints that are on disk."""
    return await asyncio.to_thread(
        lambda: [each for each in checkpoints if Path(each.path).is_dir()]
    )


class HeldStream(StreamingResponse):
    """A response that streams, and closes `reservation`, made before it began, when it ends."""

    def __init__(self, reservation: contextlib.ExitStack, content: Any, **how: Any) -> None:
        super().__init__(content, **how)
        self._reservation = reservation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._reservation:
            await super().__call__(scope, receive, send)


class Followers:
    """The open streams of server-sent events. Each holds a connection to Redis while it waits, so
    their number is bounded."""

    def __init__(self, store: Readable) -> None:
        self._store = store
        # counts by API key of access "own"; None: all others
        self._open: Counter[str | None] = Counter()

    def reserve(self) -> contextlib.ExitStack:
        """Counts one more stream, until the returned stack is closed. Raises Busy if it would
        exceed the limit of all streams or of the caller's key. `follow` does not do this because it
        begins later: several streams that are requested at once could then exceed the limit
        together."""
        num, who, whose = self._open.total(), own_jobs_of(), ""
        most = MAX_FOLLOWERS
        if who and self._open[who] >= MAX_OF_TENANT:
            num, most, whose = self._open[who], MAX_OF_TENANT, f" with key {who!r}"
        if num >= most:
            raise Busy(
                f"{num} clients{whose} follow events already, and at most {most} can; ask for a "
                "page of events instead"
            )
        self._open[who] += 1
        held = contextlib.ExitStack()
        held.callback(self._leave, who)
        return held

    def _leave(self, who: str | None) -> None:
        self._open -= Counter([who])

    async def follow(
        self, job_id: str, last: str, *, progress: bool = False, until_paused: bool = False
    ) -> AsyncGenerator[str]:
        """Yields each event after `last` as server-sent text. While nothing happens yields a
        comment, or with `progress` what the job does. Yields `end` after the last event of an ended
        or, with `until_paused`, a paused job."""
        ends = (None, *TERMINAL, *(["paused"] if until_paused else []))
        pause_s = PROGRESS_S if progress else SSE_WAIT_S
        while True:
            ended = (await self._store.status(job_id)) in ends
            wait_s = None if ended else pause_s
            new = await self._store.events(job_id, last, block_s=wait_s)
            for event in new:
                last = event.id
                yield _sse(event.id, event.type, event.model_dump_json())
            if ended and not new:
                yield _sse("", "end", "{}")
                return
            if not new:
                doing = await self._store.doing(job_id) if progress else None
                update = JobProgress(message=doing, time=time.time()) if doing else None
                yield _sse("", "progress", update.model_dump_json()) if update else ": waiting\n\n"


def _sse(id: str, type: str, data: str) -> str:
    return (f"id: {id}\n" if id else "") + f"event: {type}\ndata: {data}\n\n"


def columns(rows: Sequence[MetricsRow], wanted: Sequence[str], points: int) -> MetricsColumns:
    """Returns the rows' metrics that are `wanted` (all, if none are named), at about `points` steps
    at most."""
    names = sorted({name for row in rows for name in row.metrics})
    shown = [name for name in names if not wanted or any(_is(name, one) for one in wanted)]
    chosen = _spread(rows, points)
    return MetricsColumns(
        steps=tuple(row.step for row in chosen),
        columns={name: tuple(_short(row.metrics.get(name)) for row in chosen) for name in shown},
        names=tuple(names),
        num_steps=len(rows),
    )


def _is(name: str, wanted: str) -> bool:
    return name.startswith(wanted[:-1]) if wanted.endswith("*") else name == wanted


def _spread(rows: Sequence[MetricsRow], points: int) -> list[MetricsRow]:
    """Returns rows at even distances, the first and the last among them, and the evaluations, of
    which there are few."""
    if len(rows) <= points:
        return list(rows)
    even = {round(at * (len(rows) - 1) / (points - 1)) for at in range(points)}
    evaluated = [
        at for at, row in enumerate(rows) if any(name.startswith("eval/") for name in row.metrics)
    ]
    stride = max(1, -(-len(evaluated) // points))
    return [rows[at] for at in sorted(even | set(evaluated[::stride]))]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
