"""What run folders and records are told of a job's end, late."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from services.orchestrator.jobs.after_step import AfterStep
from services.orchestrator.jobs.decisions import Outcome, outcome_from_disk
from services.orchestrator.jobs.results import JobUsage, Price
from services.orchestrator.samplers.status import AttemptStatus
from services.orchestrator.store.connection import StoreEmptied, StoreUnavailable
from services.orchestrator.store.folder import Note, RunFolder
from services.orchestrator.store.journal import Journal
from services.orchestrator.store.leases import Lease
from services.orchestrator.store.run_folders import note_ends
from shared.errors import Conflict, HoneError
from shared.wire import MetricsRow
from tests.support.job_records import JOB

ENDED = Note(created_at=1.0, finished_at=2.0, status="failed", error="no such model")


def test_a_job_that_was_deleted_does_not_run_again(tmp_path: Path) -> None:
    """Redis was brought back from before its end, which could not be noted."""
    folder = RunFolder(tmp_path)
    folder.write_note(Note(created_at=1.0, status="running"))
    assert outcome_from_disk(folder) is None
    folder.mark_deleted()
    assert outcome_from_disk(folder) == Outcome("cancelled", "was deleted; its run folder was kept")
    folder.write_note(ENDED)
    assert outcome_from_disk(folder) == Outcome("failed", "no such model")


def store_with_ends(folder: Path, **runs: Path | HoneError) -> Mock:
    store = Mock(ended_ids=AsyncMock(return_value=[*runs]), note=AsyncMock(return_value=ENDED))
    store.ended_run_dir = AsyncMock(side_effect=list(runs.values()))
    store.get = AsyncMock(return_value=Mock(run_dir=str(folder)))
    return store


async def test_one_end_that_cannot_be_noted_keeps_no_other_from_it(tmp_path: Path) -> None:
    await note_ends(store_with_ends(tmp_path, a=Conflict("it runs"), b=tmp_path))
    assert RunFolder(tmp_path).note() == ENDED


@pytest.mark.parametrize("error", [StoreUnavailable("away"), StoreEmptied("emptied")])
async def test_no_more_ends_are_looked_for_once_redis_is_unreachable(
    tmp_path: Path, error: HoneError
) -> None:
    store = store_with_ends(tmp_path, a=error, b=tmp_path)
    await note_ends(store)
    assert (store.ended_run_dir.await_count, RunFolder(tmp_path).note()) == (1, None)


async def test_a_row_that_is_said_again_has_the_currency_of_its_cost() -> None:
    store, unused = Mock(report=AsyncMock()), cast(Any, Mock())
    services = cast(Any, Mock(status=AttemptStatus()))
    journal = Journal(store, Lease("a", 1, "trainer", 30.0))
    spent = JobUsage([], price=Price(2.0, "EUR"))
    after = AfterStep(JOB, unused, services, unused, journal, unused, spent, unused)
    await after.repeat_events(MetricsRow(step=1, metrics={"total/cost": 3.0}))
    told = store.report.await_args.kwargs
    assert (told["cost"], told["currency"], told["missing_only"]) == (3.0, "EUR", True)
