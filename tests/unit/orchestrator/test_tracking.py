"""W&B that is unreachable, slow or broken never keeps a job waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.extensions import trackers as tracking
from services.orchestrator.extensions.trackers import Tracker, TrackerReport
from shared.job import Job
from tests.support.scored_batches import make_job
from tests.support.wandb_files import offline_run


def wandb_job() -> Job:
    return Job.model_validate(make_job().model_dump() | {"wandb": {"project": "p"}})


def offline_job(**wandb: str) -> Job:
    return Job.model_validate(make_job().model_dump() | {"wandb": wandb | {"mode": "offline"}})


def without_key(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))


class FakeRun:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.exit_code: int | None = None

    def log(self, data: dict[str, Any], *, step: int) -> None:
        self.rows.append((step, data))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


async def until(condition: Any) -> None:
    async with asyncio.timeout(90):  # the real package takes seconds to start
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
    tracked = await tracker.finish(True)
    assert run.rows == [(0, {"a": 0.0}), (1, {"a": 1.0}), (2, {"a": 2.0})] and run.exit_code == 0
    assert tracked == TrackerReport("W&B has steps 0 to 2 of this run", complete=True)


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
    assert await tracker.finish(True) is None and tracker.trouble is None


async def test_two_jobs_of_one_process_have_a_run_each(tmp_path: Path) -> None:
    begun: list[str] = []

    def begin(job: Job, job_id: str, run_dir: Path) -> Any:
        run = tracking._begin(job, job_id, run_dir)
        begun.append(job_id)
        return run

    trackers: dict[str, Tracker] = {}
    for name in ("one", "two"):
        run_dir = tmp_path / name
        run_dir.mkdir()
        tracker = Tracker(offline_job(project=name), f"job-{name}", run_dir, begin)
        tracker.start()
        tracker.log(0, {})
        await until(lambda name=name: f"job-{name}" in begun)
        trackers[name] = tracker
    for step in (1, 2, 3):
        trackers["one"].log(step, {"reward": float(step)})
        trackers["two"].log(step, {"reward": -float(step)})
    ended = await asyncio.gather(*(tracker.finish(True) for tracker in trackers.values()))
    for name, sign, tracked in zip(trackers, (1.0, -1.0), ended, strict=True):
        run = offline_run(tmp_path / name)
        assert (run.id, run.name, run.project) == (f"job-{name}", f"job-{name}", name)
        assert run.rewards == {step: sign * step for step in (1, 2, 3)} and run.exit_code == 0
        where = tmp_path / name / "wandb"
        message = f"W&B has steps 0 to 3 of this run once `wandb sync` sends it what is in {where}"
        assert tracked == TrackerReport(message, complete=True)


async def test_a_wandb_run_may_have_a_name_of_its_own(tmp_path: Path) -> None:
    tracker = Tracker(offline_job(project="p", name="mine"), "job-1", tmp_path)
    tracker.start()
    tracker.log(1, {"reward": 1.0})
    await tracker.finish(False)
    run = offline_run(tmp_path)
    assert (run.id, run.name, run.exit_code) == ("job-1", "mine", 1)


async def test_without_a_key_the_job_says_that_wandb_has_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_key(monkeypatch, tmp_path)
    tracker = Tracker(wandb_job(), "job-1", tmp_path)
    tracker.start()
    tracker.log(0, {})
    await until(lambda: tracker.trouble)
    assert tracker.trouble is not None
    assert tracker.trouble.startswith("W&B has nothing of this run so far: no API key: set WANDB")
    tracker.log(1, {"reward": 1.0})
    assert await tracker.finish(True) == TrackerReport(
        "W&B has nothing of this run: no API key: set WANDB_API_KEY where the orchestrator runs; "
        "metrics.jsonl has all",
        complete=False,
    )


async def test_what_wandb_lacks_at_the_end_is_named_by_its_steps(tmp_path: Path) -> None:
    class Breaks(FakeRun):
        def log(self, data: dict[str, Any], *, step: int) -> None:
            if step > 2:
                raise ConnectionError("no route")
            super().log(data, step=step)

    tracker = Tracker(wandb_job(), "job-1", tmp_path, lambda *_: Breaks())
    tracker.start()
    for step in (1, 2, 3, 4):
        tracker.log(step, {})
    assert await tracker.finish(True) == TrackerReport(
        "W&B lacks steps 3 to 4 of this run: ConnectionError: no route; metrics.jsonl has all",
        complete=False,
    )


def test_a_missing_key_is_known_before_a_job_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_key(monkeypatch, tmp_path)
    said = tracking.missing_key(wandb_job())
    assert said is not None and said.startswith("W&B will have nothing of this run: no API key")
    assert tracking.missing_key(offline_job(project="p")) is None
    assert tracking.missing_key(make_job()) is None
    monkeypatch.setenv("WANDB_API_KEY", "short")
    said = tracking.missing_key(wandb_job())
    assert said is not None and "WANDB_API_KEY invalid" in said
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    assert tracking.missing_key(wandb_job()) is None
