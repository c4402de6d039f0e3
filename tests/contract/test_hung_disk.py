"""Disks that hang, as a network volume does whose server is unreachable: they keep no one waiting
who need not wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.jobs import needs
from services.orchestrator.jobs.needs import Dependencies
from services.orchestrator.store import identity, run_folders
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.records import Submission
from services.orchestrator.store.run_folders import accept
from services.orchestrator.store.store import Store
from shared.errors import Conflict
from shared.job import Job
from shared.settings import Settings
from tests.support import orchestrator_stack
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_stack import Stack

pytestmark = pytest.mark.slow

job, stack, store = (getattr(orchestrator_stack, name) for name in ("job", "stack", "store"))

Hang = Callable[[Any, str], None]


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Generator[Hang]:
    """Lets a function hang, until the test has ended."""
    is_back = threading.Event()

    def hung(owner: Any, name: str) -> None:
        act = getattr(owner, name)

        def waits(*args: Any) -> Any:
            is_back.wait()
            return act(*args)

        monkeypatch.setattr(owner, name, waits)

    yield hung
    is_back.set()


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"lease_s": 4.0})


async def test_a_refused_submission_is_answered_though_its_folder_cannot_be_removed(
    store: Store, job: Job, tmp_path: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folders, "DISCARDED_WITHIN_S", 0.2)
    key = "0123456789abcdef"
    first = await accept(store, Submission(job, tmp_path, key))
    hang(RunFolder, "discard")
    async with asyncio.timeout(60):
        again = await accept(store, Submission(job, tmp_path, key))
        with pytest.raises(Conflict):
            await accept(store, Submission(job.model_copy(update={"steps": 9}), tmp_path, key))
    assert again.id == first.id


async def test_what_a_job_needs_is_looked_at_on_a_disk_that_hangs(
    settings: Settings, store: Store, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "ANSWERS_WITHIN_S", 1.0)
    async with FakeServices(settings).running(settings) as running:
        settings.runs_dir.mkdir(exist_ok=True)
        assert await store.check(settings.runs_dir) is None
        looking = Dependencies(running, store)
        assert await looking.look() is None
        hang(identity, "unmounted")
        async with asyncio.timeout(60):
            missing = await looking.look()
    assert missing == (
        f"folder {str(settings.runs_dir)!r} gave no answer within 1 s; check HONE_RUNS_DIR and "
        "its disk"
    )


@pytest.mark.parametrize("write", ["write_spent", "write_batch"])
@pytest.mark.parametrize("what", ["pause", "cancel"])
async def test_a_job_whose_disk_hangs_stops_when_it_is_asked_to(
    stack: Stack, hang: Hang, what: str, write: str
) -> None:
    reached = asyncio.Event()

    async def begins(_: Any) -> None:
        if stack.fakes.step == 3:
            reached.set()
            hang(RunFolder, write)

    stack.fakes.fault["train_step"] = begins
    job_id = (await stack.submit()).id
    await asyncio.wait_for(reached.wait(), 60)
    await asyncio.sleep(0.5)
    await stack.post(f"{job_id}/{what}")
    async with asyncio.timeout(90):
        stopped = await stack.until(job_id, "paused", "cancelled")
    assert stopped.status == ("paused" if what == "pause" else "cancelled")
