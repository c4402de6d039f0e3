"""An orchestrator that is killed between making a run folder and Redis leaves one of no job."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from services.orchestrator.store.connection import StoreUnavailable
from services.orchestrator.store.folder import SUBMITTED, RunFolder
from services.orchestrator.store.found import find_runs
from services.orchestrator.store.records import Submission
from services.orchestrator.store.run_folders import UNSUBMITTED_S, accept, remove_unsubmitted
from services.orchestrator.store.store import Store
from shared.job import Job
from tests.support import orchestrator_stack

job, store = orchestrator_stack.job, orchestrator_stack.store  # fixtures


def cut_off(job: Job, runs_dir: Path, redis: str | None, age_s: float) -> Path:
    """Returns the folder of a submission whose orchestrator was killed so long ago."""
    submission = Submission(job, runs_dir)
    folder = RunFolder(submission.run_dir)
    folder.prepare(job, {}, redis, submission.note)
    return aged(folder.path, age_s)


def aged(folder: Path, age_s: float) -> Path:
    at = time.time() - age_s
    os.utime(folder / SUBMITTED, (at, at))
    return folder


async def test_a_folder_whose_job_redis_never_had_is_removed_and_not_recovered(
    store: Store, job: Job, tmp_path: Path
) -> None:
    runs_dir, old_s = tmp_path / "runs", UNSUBMITTED_S + 60
    runs_dir.mkdir()
    left = cut_off(job, runs_dir, store.identity, old_s)
    under_way = cut_off(job, runs_dir, store.identity, UNSUBMITTED_S - 60)
    anothers = cut_off(job, runs_dir, "another", old_s)
    assert find_runs(runs_dir) == []
    await remove_unsubmitted(store, runs_dir)
    assert [path.exists() for path in (left, under_way, anothers)] == [False, True, True]


async def test_a_folder_whose_job_redis_has_is_kept(
    store: Store, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis took the job, and its answer was lost: a worker continues with the folder."""
    submit = store.submit

    async def lost(submission: Submission):
        await submit(submission)
        raise StoreUnavailable("connection lost")

    monkeypatch.setattr(store, "submit", lost)
    runs_dir = tmp_path / "runs"
    runs_dir.mkdir()
    submission = Submission(job, runs_dir)
    with pytest.raises(StoreUnavailable):
        await accept(store, submission)
    folder = aged(submission.run_dir, UNSUBMITTED_S + 60)
    await remove_unsubmitted(store, runs_dir)
    assert await asyncio.to_thread(folder.is_dir)
