"""Data sets of the Hub: a commit that this machine has is taken from its cache, and a download that
hangs keeps no job."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets.config
import pytest

from services.orchestrator.data import fetching
from services.orchestrator.data.apart import apart
from services.orchestrator.data.fetching import asks_hub, fetch
from services.orchestrator.data.sources import asks_of
from services.orchestrator.loop.prompts import load_prompts
from shared.errors import Unavailable
from shared.job import Job
from shared.settings import Settings
from tests.support import orchestrator_stack
from tests.support.data_hub import COMMIT, DataHub
from tests.support.model_folders import make_model_folder
from tests.support.orchestrator_stack import Stack

pytestmark = pytest.mark.slow

stack = orchestrator_stack.stack  # fixture

DEADLINE_S = 120.0  # a process may be slow to start


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which data sets are kept, here and in processes."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf/datasets")
    return tmp_path / "hf/datasets"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataHub]:
    hub = DataHub()
    with hub.serving() as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.delenv("HF_HUB_OFFLINE")
        yield hub


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job.model_validate(
        {
            "name": "demo",
            "model": str(make_model_folder(tmp_path / "model")),
            "steps": 2,
            "data": {"train": "owner/data", "revision": COMMIT},
            "sampling": {"prompts_per_step": 2, "group_size": 2, "max_tokens": 4},
            "rewards": [{"grader": "exact_match"}],
        }
    )


async def test_a_commit_that_this_machine_has_is_read_without_the_hub(
    hub: DataHub, settings: Settings, job: Job
) -> None:
    await fetch(asks_of(job, settings).values())
    num_asked = hub.num_asked
    assert num_asked > 0
    hub.answers.clear()
    async with asyncio.timeout(DEADLINE_S):
        await fetch(asks_of(job, settings).values())
        assert not await asyncio.to_thread(asks_hub, job, settings)
        prompts = await apart(_read, job, settings, {}, deadline_s=DEADLINE_S)
    assert prompts == (20, {"train": COMMIT}, ["0?", "1?"])
    assert hub.num_asked == num_asked


async def test_no_other_commit_is_taken_for_the_one_of_the_submission(
    hub: DataHub, settings: Settings, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` takes the newest that it has, whatever was asked for, where the Hub is away."""
    await fetch(asks_of(job, settings).values())
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match=f"does not have its commit {'b' * 40}"):
        await apart(_read, job, settings, {"train": "b" * 40}, deadline_s=DEADLINE_S)


def _read(job: Job, settings: Settings, versions: dict[str, str]) -> Any:
    prompts = load_prompts(job, settings, versions)
    assert prompts.train is not None
    first = [str(problem.row["prompt"]) for problem in prompts.train[:2]]
    return prompts.num_train, prompts.versions, first


async def test_a_job_whose_data_the_hub_does_not_give_waits_and_stops_when_asked_to(
    hub: DataHub, stack: Stack, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = asyncio.Event()

    async def wait(_: Any) -> None:
        await goes_on.wait()

    await fetch(asks_of(stack.job, stack.settings).values())
    stack.fakes.fault["train_step"] = wait
    first = await stack.submit()
    second = await stack.submit()
    async with asyncio.timeout(DEADLINE_S):
        while not stack.fakes.calls["train_step"]:
            await asyncio.sleep(0.05)
    await asyncio.to_thread(shutil.rmtree, cache)
    hub.answers.clear()
    monkeypatch.setattr(fetching, "FETCH_S", 3.0)
    goes_on.set()
    assert (await stack.until(first.id)).status == "succeeded"
    async with asyncio.timeout(DEADLINE_S):
        while (await stack.get(second.id)).recoveries < 2:
            await asyncio.sleep(0.05)
    said = [event.message for event in await stack.events(second.id)]
    why = "the job's data was not fetched: it was not done in 3 s"
    assert f"{why}; loading the job again (recovery 2)" in said
    await stack.post(f"{second.id}/pause")
    assert (await stack.until(second.id, "paused")).error == "paused on request"
    monkeypatch.setattr(fetching, "FETCH_S", 1200.0)
    hub.answers.set()
    await stack.post(f"{second.id}/resume")
    assert (await stack.until(second.id, "succeeded", "paused", "failed")).status == "succeeded"
