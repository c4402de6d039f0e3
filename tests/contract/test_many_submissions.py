"""Two hundred users of the Python client who submit at once."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import hone
from shared.job import Job
from shared.settings import Settings
from shared.wire import JobList
from tests.support.fake_services import FakeServices
from tests.support.orchestrator_process import orchestrator_process
from tests.support.orchestrator_stack import job  # noqa: F401

NUM = 200


@pytest.mark.slow
async def test_200_submissions_at_once_are_all_accepted(
    settings: Settings,
    redis_url: str,
    tmp_path: Path,
    job: Job,  # noqa: F811
) -> None:
    rows = "".join(json.dumps({"prompt": f"{n}?", "answer": n}) + "\n" for n in range(5000))
    (tmp_path / "train.jsonl").write_text(rows)

    def submit(number: int) -> str:
        with hone.Client(url) as client:
            return client.submit(job.model_copy(update={"seed": number})).id

    fakes = FakeServices(settings)
    async with (
        fakes.running(settings) as settings,
        orchestrator_process(settings, redis_url) as running,
    ):
        url = running.url
        with ThreadPoolExecutor(NUM) as threads:
            loop = asyncio.get_running_loop()
            asked = [loop.run_in_executor(threads, submit, number) for number in range(NUM)]
            ids = await asyncio.gather(*asked)
        listed = await running.client.get("/v1/jobs?limit=1000", JobList)
    assert len(set(ids)) == NUM and {each.id for each in listed.jobs} == {*ids}
