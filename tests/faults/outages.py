"""What a queue of jobs needs is unreachable for minutes, one thing after another; no one does
anything.

    python -m tests.faults.outages [--minutes 7] [--only 'data|runs']

The stack is that of `make faults`. Each outage begins while a job runs, and while it lasts that job
has to say for what it waits, and no job may pause or fail. A job has to end between two outages. At
the end all have succeeded, with each step once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.report import Figure, finish, table
from deploy.machine import exit_on_signals
from services.orchestrator.store.folder import RunFolder
from shared.job import Job
from shared.wire import TERMINAL, EventList, JobRecord
from tests.faults.__main__ import FOLDER, made_job
from tests.faults.moments import Moments
from tests.faults.stack import Stack
from tests.faults.trial import submit

OUTAGES = ("reward", "trainer", "rollout", "data", "runs")
LOOK_S = 1.0
GOES_ON_S = 240.0
"""Seconds after an outage by which a job must have ended: engine and ranks start again."""


@dataclass
class Outage:
    """What was away for how many seconds. `waits` is what the running job said of it, `queued` how
    many jobs stayed in the queue, `back_s` the seconds from its end until a job had ended."""

    what: str
    away_s: float
    waits: str = ""
    queued: int = 0
    back_s: float = 0.0
    hands: list[str] = field(default_factory=list[str])


class Jobs:
    """The jobs of the queue, as one sees them from outside."""

    def __init__(self, stack: Stack, ids: Sequence[str]) -> None:
        self._stack = stack
        self._ids = ids

    async def all(self) -> list[JobRecord]:
        get = self._stack.client.get
        return [await get(f"/v1/jobs/{id}", JobRecord, deadline_s=120.0) for id in self._ids]

    async def num_ended(self) -> int:
        return sum(record.status in TERMINAL for record in await self.all())

    async def running(self) -> None:
        """Returns once a job that runs has done a step."""
        while not any(each.status == "running" and each.step for each in await self.all()):
            await asyncio.sleep(LOOK_S)

    async def hands(self) -> list[str]:
        """Returns why jobs paused or failed, if any did."""
        return [
            f"{record.id} {record.status}: {record.error}"
            for record in await self.all()
            if record.status in ("paused", "failed", "cancelled")
        ]


async def run(job: Job, outages: Sequence[str], away_s: float) -> tuple[list[Outage], list[str]]:
    """Returns what each outage came to, and what is wrong with the jobs at the end."""
    async with Stack(Moments().seen) as stack:
        stack.keeps = True  # also where this ends by an error
        print(f"logs and run folders: {stack.folder}", flush=True)
        data = stack.folder / "volume"
        shutil.copytree(Path(str(job.data.train)).parent, data, ignore=_without_models)
        mounted = {
            "train": str(data / Path(str(job.data.train)).name),
            "eval": str(data / Path(str(job.data.eval)).name),
        }
        job = job.model_copy(update={"data": job.data.model_copy(update=mounted)})
        jobs = Jobs(stack, [(await submit(stack, job)).id for _ in outages])
        found = [await _outage(stack, jobs, what, away_s) for what in outages]
        async with asyncio.timeout(GOES_ON_S * len(outages)):
            while await jobs.num_ended() < len(outages) and not await jobs.hands():
                await asyncio.sleep(LOOK_S)
        wrong = [each for record in await jobs.all() for each in await _wrong(stack, record)]
        stack.keeps = bool(wrong)
        return found, wrong


async def _outage(stack: Stack, jobs: Jobs, what: str, away_s: float) -> Outage:
    await jobs.running()
    ended, outage = await jobs.num_ended(), Outage(what, away_s)
    _begin(stack, what)
    until = time.monotonic() + away_s
    while time.monotonic() < until:
        records = await jobs.all()
        waits = [str(record.waits) for record in records if record.waits]
        outage.waits = waits[0] if waits else outage.waits
        outage.queued = sum(record.status == "queued" for record in records)
        await asyncio.sleep(LOOK_S)
    _end(stack, what)
    back_at = time.monotonic()
    while await jobs.num_ended() == ended and time.monotonic() < back_at + GOES_ON_S:
        await asyncio.sleep(LOOK_S)
    outage.back_s = time.monotonic() - back_at
    outage.hands = await jobs.hands()
    print(f"{what}: {outage.waits}; hands: {outage.hands or 'none'}", flush=True)
    return outage


def _begin(stack: Stack, what: str) -> None:
    match what:
        case "data":
            (stack.folder / "volume").rename(stack.folder / "unmounted")
        case "runs":
            _remount(stack.runs, "ro")
        case service:
            stack.held.add(service)
            os.kill(stack.pid(service), signal.SIGKILL)


def _end(stack: Stack, what: str) -> None:
    match what:
        case "data":
            (stack.folder / "unmounted").rename(stack.folder / "volume")
        case "runs":
            _remount(stack.runs, "rw")
        case service:
            stack.held.discard(service)


def _remount(folder: Path, mode: str) -> None:
    """Makes the disk of the run folders read-only, or not: not in the instant of a write."""
    for _ in range(200):
        command = ["mount", "-o", f"remount,{mode}", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.05)
    raise OSError(f"{folder} cannot be mounted {mode}")


async def _wrong(stack: Stack, record: JobRecord) -> list[str]:
    """Returns what is wrong with an ended job, in sentences."""
    if record.status != "succeeded":
        return [f"{record.id} {record.status}: {record.error}"]
    events = (await stack.client.get(f"/v1/jobs/{record.id}/events", EventList)).events
    steps = [row.step for row in RunFolder(Path(record.run_dir)).metrics()]
    wrong = [f"{record.id}: {event.message}" for event in events if _is_pause(event.data)]
    if steps != [*range(record.steps + 1)]:
        wrong.append(f"{record.id}: the rows are of steps {steps}")
    return wrong


def _is_pause(data: dict[str, object]) -> bool:
    return data.get("status") in ("paused", "failed")


def _without_models(_folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith((".jsonl", ".json", ".csv"))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.outages", description=__doc__)
    parser.add_argument("--minutes", type=float, default=7.0, help="of each outage (default: 7)")
    parser.add_argument("--only", default="", help="a pattern: those whose name has it")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    exit_on_signals(signal.SIGTERM)
    outages = [what for what in OUTAGES if re.search(arguments.only, what)]
    job = made_job(0)
    found, wrong = asyncio.run(run(job, outages, 60.0 * arguments.minutes))
    rows = [(each.what, f"{each.back_s:.0f} s", each.queued, each.waits) for each in found]
    print(table(rows, ("away", "a job ended after", "in the queue", "the running job waited for")))
    silent = [each.what for each in found if not each.waits]
    figures = [
        Figure("jobs that succeeded", len(outages) - len(wrong), goal=len(outages)),
        Figure("outages that needed a hand", sum(bool(e.hands) for e in found), "", 0, "max"),
        Figure("outages in which no job said for what it waits", len(silent), "", 0, "max"),
        Figure("from the end of an outage to the end of a job", max(e.back_s for e in found), "s"),
    ]
    return finish("outages", figures, minutes=arguments.minutes, problems=json.dumps(wrong))


if __name__ == "__main__":
    sys.exit(main())
