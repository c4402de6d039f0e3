"""A job's metrics by column, as charts take them: only the metrics that are shown, and no more
points than a chart has room for. And how its weights reached the samplers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import Response

from services.orchestrator.api.history import Step
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.reading import Readable
from shared.http import rendering
from shared.http.rendering import render
from shared.http.service import Service
from shared.wire import MetricsColumns, MetricsRow, Sync, SyncList
from shared.wire.pages import MAX_ROWS

DIGITS = 7
"""Significant digits of a value. A chart has room for three; a table shows six."""


def add_routes(service: Service, store: Readable) -> None:
    _add_columns(service, store)
    _add_syncs(service, store)


def _add_columns(service: Service, store: Readable) -> None:
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


def _add_syncs(service: Service, store: Readable) -> None:
    @service.app.get("/v1/jobs/{job_id}/syncs")
    async def syncs(job_id: str, last: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 100) -> SyncList:
        """How the last versions of the job's weights reached its samplers."""
        run = RunFolder(Path((await store.get(job_id)).run_dir))
        rows = (await asyncio.to_thread(run.syncs))[-last:]
        return SyncList(syncs=tuple(Sync.model_validate(row, extra="ignore") for row in rows))


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
    apart = max(1, -(-len(evaluated) // points))
    return [rows[at] for at in sorted(even | set(evaluated[::apart]))]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
