"""The page for run folders without an orchestrator, with its read-only routes. It needs neither
Redis nor services: `python -m services.orchestrator.extensions.page.view FOLDER...`, which `hone
view` runs. Folders are read again when they change."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from services.orchestrator.api import history, jobs, rollouts
from services.orchestrator.extensions.diagnosis import diagnosing
from services.orchestrator.extensions.diagnosis.facts import record_of
from services.orchestrator.extensions.page import routes as page
from services.orchestrator.store.folder import JOB, NOTE, RunFolder
from services.orchestrator.store.lists import JobFilter
from services.orchestrator.store.records import FoundRun, check_event_id, find_run
from shared.errors import BadRequest, HoneError, no_job
from shared.host import logs
from shared.host.processes import free_port
from shared.http.service import Service
from shared.http.urls import url_at
from shared.job import Job
from shared.settings import Settings, load_settings
from shared.wire import Checkpoint, Event, JobList, JobRecord, JobSummary, MetricsRow

LOOK_S = 1.0
"""Seconds between two reads of a folder that a client follows."""

CHANGING = ("metrics.jsonl", NOTE, JOB, "summary.json", "checkpoints")
"""The files that change in a run folder when the job continues."""


class Folders:
    """The jobs of `folders`. Has the methods of `Readable`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = {folder.name: folder for folder in folders}
        self._known: dict[str, tuple[tuple[float, ...], JobRecord, list[Checkpoint]]] = {}

    async def get(self, job_id: str) -> JobRecord:
        return (await asyncio.to_thread(self._look, job_id))[0]

    async def list(self, after: str | None, limit: int, wanted: JobFilter | None = None) -> JobList:
        """Returns the jobs, newest first, as the store does: an unreadable one by its id alone."""
        wanted = wanted or JobFilter()
        records, unreadable = await asyncio.to_thread(self._look_at_all)
        found = sorted(
            (one for one in records if _is(one, wanted)), key=lambda one: -one.created_at
        )
        start = 0
        if after is not None:
            ids = [one.id for one in found]
            start = ids.index(after) + 1 if after in ids else len(ids)
        page = found[start : start + limit]
        fields = set(JobSummary.model_fields)
        return JobList(
            jobs=tuple(JobSummary(**one.model_dump(include=fields)) for one in page),
            unreadable=tuple(unreadable) if after is None else (),
            next_after=page[-1].id if start + limit < len(found) else None,
        )

    async def status(self, job_id: str) -> str | None:
        return (await self.get(job_id)).status if job_id in self._folders else None

    async def doing(self, job_id: str) -> str | None:
        return (await self.get(job_id)).doing

    async def events(
        self, job_id: str, after: str, *, block_s: float | None = None, count: int = 1000
    ) -> list[Event]:
        """Returns the events that the folder contains: one for each step whose time is known."""
        check_event_id(after, "after")
        end = time.monotonic() + (block_s or 0)
        while True:
            found = await asyncio.to_thread(self._events, job_id)
            newer = [event for event in found if _place(event.id) > _place(after)]
            if newer or time.monotonic() >= end:
                return newer[:count]
            await asyncio.sleep(LOOK_S)

    async def newest_events(self, job_id: str, before: str | None, limit: int) -> list[Event]:
        found = await asyncio.to_thread(self._events, job_id)
        older = [one for one in found if before is None or _place(one.id) < _place(before)]
        return older[::-1][:limit]

    async def checkpoints(self, job_id: str) -> list[Checkpoint]:
        return (await asyncio.to_thread(self._look, job_id))[1]

    def _look_at_all(self) -> tuple[list[JobRecord], list[str]]:
        records: list[JobRecord] = []
        unreadable: list[str] = []
        for job_id in self._folders:
            try:
                records.append(self._look(job_id)[0])
            except BadRequest:  # the page of the job says why
                unreadable.append(job_id)
        return records, unreadable

    def _look(self, job_id: str) -> tuple[JobRecord, list[Checkpoint]]:
        folder = self._folders.get(job_id)
        if folder is None:
            raise no_job(job_id)
        stamp = tuple(_modified(folder / name) for name in CHANGING)
        known = self._known.get(job_id)
        if known is None or known[0] != stamp:
            found = find_run(folder)
            if found is None or found.job is None:
                why = found and found.problem
                raise BadRequest(why or f"{str(folder)!r} is not a run folder: it has no job.json")
            known = (stamp, _record(found, found.job), found.checkpoints)
            self._known[job_id] = known
        return known[1], known[2]

    def _events(self, job_id: str) -> list[Event]:
        record, _ = self._look(job_id)
        folder = RunFolder(self._folders[job_id])
        return [
            event for row in folder.metrics() if (event := _event(record, folder, row)) is not None
        ]


def run_folders(given: Iterable[Path]) -> list[Path]:
    """Returns the run folders among `given` and, where one has no job, the run folders in it.
    Raises BadRequest if a path has none."""
    found: dict[str, Path] = {}
    for path in given:
        own = path.resolve()
        inside = (
            [own] if (own / JOB).exists() else sorted(file.parent for file in own.glob(f"*/{JOB}"))
        )
        if not inside:
            raise BadRequest(f"{str(path)!r} has no run folder; expected runs/<job>, or runs")
        found |= {each.name: each for each in inside if not each.is_symlink()}
    return list(found.values())


def _record(run: FoundRun, job: Job) -> JobRecord:
    """Returns the record, with the status that the folder noted last: no one knows whether a job
    that has not ended still runs."""
    written = max(_modified(run.path / name) for name in CHANGING)
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(written))
    own = {
        "status": run.note.status,
        "error": run.error,
        "reward": run.reward,
        "metadata": job.metadata,
        "doing": None if run.end else f"its run folder was last written to on {at}",
    }
    return record_of(run, job).model_copy(update=own)


def _event(record: JobRecord, folder: RunFolder, row: MetricsRow) -> Event | None:
    """Returns the event of a row; None if the time of the step is not known. It is the time of
    the batch's file, which was written when the batch had been graded."""
    time_s = _modified(folder.path / f"rollouts/{row.step:06d}.msgpack")
    if not time_s and row.step == record.step:
        time_s = _modified(folder.path / "metrics.jsonl")
    if not time_s:
        return None
    reward = row.metrics.get("reward")
    shown = "none" if reward is None else format(reward, ".3f")
    return Event(
        id=f"{row.step + 1}-0",
        job_id=record.id,
        time=time_s,
        type="step",
        message=f"step {row.step}/{record.steps}: reward {shown}",
        data={"step": row.step, "steps": record.steps, "metrics": row.metrics},
    )


def _is(record: JobRecord, wanted: JobFilter) -> bool:
    has = wanted.metadata
    return (
        wanted.status in (None, record.status)
        and wanted.name in (None, record.name)
        and (not record.metadata if has is None else has.items() <= record.metadata.items())
    )


def _place(event_id: str) -> tuple[int, ...]:
    return tuple(map(int, event_id.split("-")))


def _modified(path: Path) -> float:
    """Returns the file's time of change, in Unix seconds; 0 if there is no file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


READ_ONLY = {"read_only": True}
"""Added to `/version`, so that the page offers no changes."""


def create_view(settings: Settings, folders: Sequence[Path]) -> Service:
    """Returns the service that shows the run folders."""
    found = Folders(folders)
    service = Service(
        "orchestrator", settings, version_info=lambda: READ_ONLY, public=page.is_public
    )
    jobs.add_reading(service, found)
    history.add_routes(service, found)
    diagnosing.add_routes(service, found)
    rollouts.add_routes(service, found)
    page.add_routes(service)
    return service


def main() -> None:
    parser = argparse.ArgumentParser(prog="hone view", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    try:
        folders = run_folders(arguments.folders)
        settings = load_settings()
        logs.configure("view", settings.model_copy(update={"log_level": "warning"}))
        port = arguments.port or free_port()
        server = create_view(settings, folders).server(port)
    except HoneError as error:
        sys.exit(f"hone: {error.detail}")
    url = f"{url_at(settings.host, port)}/"
    said = f"{len(folders)} run(s) at {url}; Ctrl-C ends it"
    sys.stdout.write((json.dumps({"url": url}) if arguments.output == "json" else said) + "\n")
    sys.stdout.flush()
    server.run()


if __name__ == "__main__":
    main()
