"""W&B that is away, slow or broken never keeps a job waiting."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.orchestrator.record import tracking
from services.orchestrator.record.tracking import Tracker
from shared.job import Job
from tests.support.scored_batches import make_job


def wandb_job() -> Job:
    return Job.model_validate(make_job().model_dump() | {"wandb": {"project": "p"}})


class FakeRun:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.exit_code: int | None = None

    def log(self, data: dict[str, Any], *, step: int) -> None:
        self.rows.append((step, data))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_rows_that_were_not_taken_are_sent_with_the_next(tmp_path: Path) -> None:
    run, failures = FakeRun(), iter([ConnectionError("no route"), ConnectionError("no route")])

    def begin(*_: Any) -> FakeRun:
        if error := next(failures, None):
            raise error
        return run

    tracker = Tracker(wandb_job(), "job-1", tmp_path, begin)
    tracker.start()
    tracker.log(0, {"a": 0.0})
    await until(lambda: tracker.trouble)
    assert tracker.trouble is not None and "ConnectionError: no route" in tracker.trouble
    tracker.log(1, {"a": 1.0})
    tracker.log(2, {"a": 2.0})
    await tracker.finish(True)
    assert run.rows == [(0, {"a": 0.0}), (1, {"a": 1.0}), (2, {"a": 2.0})] and run.exit_code == 0


async def test_a_wandb_that_hangs_neither_keeps_steps_waiting_nor_the_end_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "FINISH_S", 0.2)
    released = threading.Event()

    def begin(*_: Any) -> FakeRun:
        released.wait(30)
        return FakeRun()

    tracker = Tracker(wandb_job(), "job-1", tmp_path, begin)
    tracker.start()
    start = time.monotonic()
    for step in range(100):
        tracker.log(step, {})
    await tracker.finish(False)
    assert time.monotonic() - start < 5
    assert tracker.trouble is not None and "did not take the rest" in tracker.trouble
    released.set()


async def test_a_job_without_a_wandb_section_begins_no_run(tmp_path: Path) -> None:
    tracker = Tracker(make_job(), "job-1", tmp_path, lambda *_: pytest.fail("begun"))
    tracker.start()
    tracker.log(1, {})
    await tracker.finish(True)
    assert tracker.trouble is None


def test_a_run_has_the_jobs_id_and_the_name_that_the_job_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    wandb = SimpleNamespace(init=lambda **given: asked.append(given), Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for spec in ({"project": "p"}, {"project": "p", "name": "mine"}):
        job = Job.model_validate(make_job().model_dump() | {"wandb": spec})
        tracking._begin(job, "job-1", tmp_path)
    assert [(one["id"], one["name"]) for one in asked] == [("job-1", "job-1"), ("job-1", "mine")]
