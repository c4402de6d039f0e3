"""One job that is struck by several faults, one after another, and what it came to: compared with
the same job undisturbed, for which the sampled batches are replayed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.orchestrator.store.folder import RunFolder
from shared.errors import HoneError
from shared.job import Job
from shared.wire import (
    TERMINAL,
    EventList,
    JobRecord,
    JobState,
    SubmitRequest,
)
from tests.faults.moments import Moments
from tests.faults.plan import Fault
from tests.faults.stack import Stack
from tests.faults.strikes import into_s, strike

GOES_ON_S = 150.0
"""Seconds after a fault by which the job must have done another step."""

POLL_S = 0.2


class DoesNotGoOn(Exception):
    """The job did no further step after a fault."""


@dataclass
class Struck:
    """A fault as it was: `while_` is the stage that had begun last, `gap_s` the seconds from the
    row before it to the second new one after it, `steps` those done in them. `hands` are the
    reasons for which the job paused meanwhile."""

    fault: Fault
    while_: str
    gap_s: float
    steps: list[int]
    hands: list[str]


@dataclass
class Trial:
    """What a job came to. `usual` are the steps that no fault fell into, and their seconds;
    `problems` is what was lost, doubled or different."""

    job_id: str
    struck: list[Struck] = field(default_factory=list[Struck])
    usual: dict[int, float] = field(default_factory=dict[int, float])
    problems: list[str] = field(default_factory=list[str])
    record: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class Running:
    """A job under way, as one sees it from outside."""

    stack: Stack
    moments: Moments
    id: str
    paused: list[str] = field(default_factory=list[str])

    async def get(self) -> JobRecord:
        return await self.stack.client.get(f"/v1/jobs/{self.id}", JobRecord, deadline_s=120.0)

    async def status(self) -> str:
        """Returns the job's status; a paused job is resumed, and the reason noted."""
        record = await self.get()
        if record.status == "paused":
            self.paused.append(record.error or "it says no reason")
            await post(self.stack, f"{self.id}/resume")
        return record.status

    async def ends(self) -> JobRecord:
        while await self.status() not in TERMINAL:
            await asyncio.sleep(POLL_S)
        return await self.get()


async def post(stack: Stack, path: str) -> JobState:
    return await stack.client.call("POST", f"/v1/jobs/{path}", None, JobState, deadline_s=120.0)


async def submit(stack: Stack, job: Job) -> JobRecord:
    body = SubmitRequest(job=job)
    return await stack.client.call("POST", "/v1/jobs", body, JobRecord, deadline_s=120.0)


async def run_trial(
    stack: Stack,
    moments: Moments,
    job: Job,
    faults: Sequence[Fault],
    until: float,
    note: Callable[[str, Struck], None],
) -> Trial:
    """Returns what became of one job: the first of the `faults` strike it, as many as find their
    stage before it ends and before `until` (time.monotonic). `note` hears of each, with the job's
    id. Raises DoesNotGoOn."""
    moments.times.clear()
    running = Running(stack, moments, (await submit(stack, job)).id)
    replay = await submit(stack, job)
    await post(stack, f"{replay.id}/pause")
    trial = Trial(running.id)
    run = stack.runs / running.id
    looking = asyncio.create_task(moments.look(run, job))
    ending = asyncio.create_task(running.ends())
    try:
        await _first(ending, _step(moments, 0))
        for fault in faults:
            if time.monotonic() > until or ending.done():
                break
            if (struck := await _strike(running, fault, ending)) is None:
                break
            trial.struck.append(struck)
            note(running.id, struck)
        record = await ending
        trial.usual = usual(moments.times, trial.struck)
        kept = ("status", "attempts", "recoveries")
        trial.record = {name: getattr(record, name) for name in kept}
        trial.problems = await problems_of(stack, record, replay.id)
    finally:
        for task in (looking, ending):
            task.cancel()
        await asyncio.gather(looking, ending, return_exceptions=True)
    return trial


async def _strike(running: Running, fault: Fault, ending: asyncio.Task[JobRecord]) -> Struck | None:
    """Returns what the fault did; None if the job ended before its stage began. It is over after
    two steps more: of the first one, all that needs what it struck may have been done."""
    moments = running.moments
    begins = asyncio.create_task(moments.begins(fault.stage))
    await asyncio.wait({begins, ending}, return_when=asyncio.FIRST_COMPLETED)
    if not begins.done():
        begins.cancel()
        return None
    await asyncio.sleep(into_s(fault))
    before, last, paused = moments.furthest, max(moments.times.values()), len(running.paused)
    while_ = moments.now
    await strike(running.stack, fault)
    over = moments.furthest
    try:
        async with asyncio.timeout(GOES_ON_S):
            await _first(ending, _step(moments, over + 1))
    except TimeoutError as error:
        story = await _story(running)
        raise DoesNotGoOn(f"{fault}: no step for {GOES_ON_S:g} s: {story}") from error
    end = moments.times.get(over + 2, time.monotonic())
    steps = [step for step in moments.times if before < step <= over + 2]
    return Struck(fault, while_, end - last, steps, running.paused[paused:])


async def _first(ending: asyncio.Task[JobRecord], other: Coroutine[Any, Any, None]) -> None:
    """Returns once the job has ended or `other` is done."""
    task = asyncio.create_task(other)
    try:
        await asyncio.wait({ending, task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
    if ending.done():
        ending.result()


async def _step(moments: Moments, after: int) -> None:
    while moments.furthest <= after:
        await asyncio.sleep(0.01)


def usual(times: dict[int, float], struck: Sequence[Struck]) -> dict[int, float]:
    """Returns the seconds of each step whose row, and the one before, came undisturbed."""
    disturbed = {step for each in struck for step in each.steps}
    return {
        step: times[step] - times[step - 1]
        for step in times
        if step > 1 and step - 1 in times and step not in disturbed
    }


async def _story(running: Running) -> str:
    """Returns the job's last events, for an operator who has to find out."""
    with contextlib.suppress(HoneError):
        found = await running.stack.client.get(f"/v1/jobs/{running.id}/events", EventList)
        return " | ".join(event.message for event in found.events[-6:])
    return "the orchestrator does not answer"


# --- what it came to


async def problems_of(stack: Stack, record: JobRecord, replay_id: str) -> list[str]:
    """Returns what is wrong with an ended job, in sentences."""
    if record.status != "succeeded":
        return [f"it {record.status}: {record.error}"]
    folder, steps = RunFolder(Path(record.run_dir)), record.steps
    events = (await stack.client.get(f"/v1/jobs/{record.id}/events", EventList)).events
    told = {event.data["step"] for event in events if event.type == "step"}
    rows = [json.loads(line)["step"] for line in _lines(folder.path / "metrics.jsonl")]
    wrong: list[str] = []
    if rows != [*range(steps + 1)]:
        wrong.append(f"the rows are of steps {rows}")
    if folder.batch_steps() != [*range(1, steps + 1)]:
        wrong.append(f"batches are stored of steps {folder.batch_steps()}")
    if told != {*range(1, steps + 1)}:
        wrong.append(f"events tell of steps {sorted(told)}")
    if record.step != steps:
        wrong.append(f"the record says step {record.step}")
    return wrong + await _differences(stack, folder, replay_id)


async def _differences(stack: Stack, folder: RunFolder, replay_id: str) -> list[str]:
    """Returns in which weights the job differs from one that nothing disturbed, and that trains on
    the same batches."""
    undisturbed = stack.runs / replay_id
    shutil.copytree(folder.path / "rollouts", undisturbed / "rollouts")
    await post(stack, f"{replay_id}/resume")
    record = await Running(stack, Moments(), replay_id).ends()
    if record.status != "succeeded":
        return [f"the replay {record.status}: {record.error}"]
    if any("time/generate" in row.metrics for row in RunFolder(undisturbed).metrics()):
        return ["the replay sampled a batch of its own"]
    digests, expected = _digests(folder.path), _digests(undisturbed)
    wrong = [
        f"version {version} had digests {sorted(found)}, undisturbed {expected.get(version)}"
        for version, found in digests.items()
        if found != expected.get(version)
    ]
    if _weights(folder.path) != _weights(undisturbed):
        wrong.append("the last checkpoint's weights differ from the undisturbed job's")
    for run in (folder.path, undisturbed):
        if wrong:
            shutil.copytree(run, stack.folder / "different" / run.name)
        shutil.rmtree(run)  # their disk is small
    return wrong


def _digests(run: Path) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for row in map(json.loads, _lines(run / "weights.jsonl")):
        found.setdefault(row["version"], set()).add(row["digest"])
    return found


def _weights(run: Path) -> bytes:
    return max((run / "checkpoints").glob("step-*")).joinpath("model.safetensors").read_bytes()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
